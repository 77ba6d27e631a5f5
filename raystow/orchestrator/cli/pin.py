"""``raystow pin`` and ``raystow unpin``: names under which versions are kept for good."""

from __future__ import annotations

from typing import Annotated

import typer

from ...storage.errors import NotFound
from .present import emit, printable, say
from .target import LATEST, Json, Uri, open_target

_LONGEST = 100  # characters; every pin stands in the root, which each commit writes again

Name = Annotated[str, typer.Argument(metavar="NAME", help="The pin's name.", show_default=False)]


def pin(
    uri: Uri,
    version: Annotated[
        str, typer.Argument(metavar="VERSION", help="A version's id, the name of a pin, or 'latest'.", show_default=False)
    ],
    name: Name,
    move: Annotated[bool, typer.Option("--move", help="If the name holds another version, let go of that one.")] = False,
    json: Json = False,
) -> None:
    """Keep a version for good, under a name.

    Retention never drops a pinned version, and every command that takes a VERSION takes the name. A name holds one version:
    only --move gives it to another. A version may have several names.

    Example:  raystow pin s3://bucket/runs/llama 7 best
    """
    _check(name)
    target = open_target(uri)
    chosen = target.version(version)
    before = target.root.pins.get(name)
    target.repository.pin(chosen, name, move=move)
    if json:
        emit({"uri": target.repository.uri, "name": name, "version": chosen.id, "step": chosen.step, "before": before})
        return
    moved = f"; version {before} was it before" if before not in (None, chosen.id) else ""
    say(f"version {chosen.id} (step {chosen.step}) is pinned as {printable(name)}{moved}")


def unpin(uri: Uri, name: Name, json: Json = False) -> None:
    """Take a pin away. Its version stays until retention or `raystow prune` drops it.

    Example:  raystow unpin s3://bucket/runs/llama best
    """
    target = open_target(uri)
    held = target.root.pins.get(name)
    if held is None:
        pins = ", ".join(sorted(target.root.pins))
        remedy = f"there are {pins}" if pins else "`raystow ls` lists versions and pins"
        raise NotFound(f"there is no pin {name!r}", subject=target.repository.uri, remedy=remedy)
    target.repository.unpin(name)
    if json:
        emit({"uri": target.repository.uri, "name": name, "version": held})
        return
    others = [other for other in target.pins(held) if other != name]
    follows = f"it is still pinned as {', '.join(others)}" if others else "retention may drop it now"
    say(printable(f"version {held} is not pinned as {name} any more; {follows}"))


def _check(name: str) -> None:
    """Refuse a name that no command would find, or that nobody could read."""
    if name.isdecimal() or name == LATEST or name.startswith("-"):
        raise typer.BadParameter(f"{name!r} cannot be a name: it means something else; take one as best or release-1")
    if not name.strip() or not name.isprintable() or len(name) > _LONGEST:
        raise typer.BadParameter(f"a name has 1 to {_LONGEST} characters that can be printed, as best or release-1")
