"""``raystow doctor``: what this machine, and the store behind an address, can do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from .present import emit, out, printable
from .target import Json

if TYPE_CHECKING:
    from .checks.finding import Finding

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def doctor(
    uri: Annotated[
        str | None, typer.Argument(metavar="URI", help="A repository, or the place for one: its store is tried out, too.")
    ] = None,
    json: Json = False,
) -> None:
    """Check what this machine can do and, with a URI, what the store can.

    Each line is ok, a warning or failed, with what follows from it. No Ray cluster and no GPU is not a failure. In the store
    some objects are written below probe/ and removed again. The exit code is that of the first failure.

    Example:  raystow doctor s3://bucket/runs/llama
    """
    found = []
    for finding in _findings(uri):
        found.append(finding)
        if not json:
            _tell(finding)
    broken = [finding for finding in found if finding.status.value == "failed"]
    if json:
        checks = [{"name": f.name, "status": f.status.value, "found": f.found, "follows": f.follows} for f in found]
        emit({"uri": uri, "ok": not broken, "checks": checks})
    if broken:
        raise typer.Exit(broken[0].code)


def _findings(uri: str | None) -> Iterator[Finding]:
    from .checks import hardware, software
    from .checks.finding import examined

    yield from examined((*software.CHECKS, *hardware.CHECKS))
    if uri is not None:
        from .checks.store import check_store

        yield from check_store(uri)


def _tell(finding: Finding) -> None:
    """Print one finding as soon as it is made: some take seconds."""
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_column(width=7, style=_STYLES[finding.status.value])
    line.add_column(width=18)
    line.add_column(overflow="fold")
    line.add_row(finding.status.value, finding.name, printable(finding.found))
    if finding.follows:
        line.add_row("", "", f"-> {printable(finding.follows)}", style="dim")
    out.print(line)
