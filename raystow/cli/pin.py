"""``raystow pin`` and ``raystow unpin``."""

from __future__ import annotations

from typing import Annotated

import typer

from ..storage.errors import NotFound
from ..storage.versions.version_selector import is_reserved
from .options import Json, Uri, Which
from .output import emit, say
from .target import open_target

_LONGEST = 100  # characters; pins are in the root, which each commit writes again

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the pin.", show_default=False)]


def pin(
    uri: Uri,
    version: Which,
    name: Name,
    move: Annotated[bool, typer.Option("--move", help="Move the name if another version has it.")] = False,
    json: Json = False,
) -> None:
    """Keep a version under a name.

    Retention never drops a pinned version, and commands accept the name as VERSION. A version may have several names. `latest`,
    numbers and names that begin with `-` or `step:` are refused.

    Example:  raystow pin s3://bucket/runs/llama 7 best
    """
    if is_reserved(name) or name.startswith("-"):
        raise typer.BadParameter(f"{name!r} has another meaning: choose a name such as best or release-1")
    if not name.strip() or not name.isprintable() or len(name) > _LONGEST:
        raise typer.BadParameter(f"a name has 1 to {_LONGEST} printable characters, such as best or release-1")
    target = open_target(uri)
    chosen = target.version(version)
    before = target.root.pins.get(name)
    target.repository.pin(chosen, name, move=move)
    if json:
        emit({"uri": target.uri, "name": name, "version": chosen.id, "step": chosen.step, "before": before})
        return
    moved = f"; the name was version {before}'s" if before not in (None, chosen.id) else ""
    say(f"version {chosen.id} (step {chosen.step}) is pinned as {name}{moved}")


def unpin(uri: Uri, name: Name, json: Json = False) -> None:
    """Remove a pin.

    The version stays until retention or `raystow prune` drops it.

    Example:  raystow unpin s3://bucket/runs/llama best
    """
    target = open_target(uri)
    pinned = target.root.pins.get(name)
    if pinned is None:
        pins = ", ".join(sorted(target.root.pins))
        remedy = f"the pins are {pins}" if pins else "`raystow ls` lists versions and pins"
        raise NotFound(f"there is no pin {name!r}", subject=target.uri, remedy=remedy)
    target.repository.unpin(name)
    if json:
        emit({"uri": target.uri, "name": name, "version": pinned})
        return
    others = [other for other in target.pins(pinned) if other != name]
    follows = f"it is still pinned as {', '.join(others)}" if others else "retention may drop it now"
    say(f"version {pinned} is no longer pinned as {name}; {follows}")
