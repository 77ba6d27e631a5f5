"""``raystow verify``: whether every byte is still what was written."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...storage.errors import Damaged
from .present import count, emit, out, size
from .progress import byte_bar
from .reporting import complain, described, exit_code
from .target import LATEST, Json, Target, Uri, open_target

if TYPE_CHECKING:
    from ...storage.version import Version


def verify(
    uri: Uri,
    version: Annotated[
        str | None, typer.Argument(metavar="VERSION", help="A version's id, the name of a pin, or 'latest' (the default).")
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="Every version, oldest first, also after one that is damaged.")] = False,
    json: Json = False,
) -> None:
    """Read every byte of a version and hold it against its digests.

    Names the damaged object and exits with 3 if anything is missing, cut or changed.

    Example:  raystow verify s3://bucket/runs/llama --all
    """
    if all and version is not None:
        raise typer.BadParameter("give a version or --all, not both")
    target = open_target(uri)
    chosen = target.versions() if all else [target.version(version or LATEST)]
    results = [_verified(target, one, quiet=json) for one in chosen]
    damage = [result["error"] for result in results if "error" in result]
    if json:
        emit({"uri": target.repository.uri, "versions": results, **({"error": damage[0]} if damage else {})})
    elif not results:
        out.print(f"no version yet in {target.repository.uri}", soft_wrap=True)
    if damage:
        raise typer.Exit(exit_code(Damaged("")))


def _verified(target: Target, version: Version, *, quiet: bool) -> dict[str, Any]:
    """The JSON fields of one version's verification, told to a person on the way unless ``quiet``."""
    repository = target.repository
    start = repository.clock.monotonic()
    head = {"id": version.id, "step": version.step}
    name = f"version {version.id} (step {version.step})"
    try:
        with byte_bar(f"version {version.id}", version.raw, quiet=quiet) as advance:
            found = repository.verify(version, advance)
    except Damaged as error:
        if all(entry.attempt != version.attempt for entry in repository.root().versions):
            if not quiet:  # its objects went with it: no damage
                out.print(f"{name}: removed from the repository meanwhile")
            return {**head, "outcome": "removed"}
        report = described(error)
        if not quiet:
            out.print(f"{name}: DAMAGED", style="bold red")
            complain(report)
        return {**head, "outcome": "damaged", "error": report}
    seconds = repository.clock.monotonic() - start
    if not quiet:
        what = f"{count(found.tensors, 'tensor')}, {count(found.chunks, 'chunk')}, {size(found.stored)} read in {seconds:.1f} s"
        out.print(f"{name}: whole, {what}")
    counts = {key: value for key, value in asdict(found).items() if key not in ("version", "step")}
    return {**head, "outcome": "whole", **counts, "seconds": round(seconds, 3)}
