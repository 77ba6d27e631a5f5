"""``raystow doctor``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from .options import Json
from .output import emit, out, printable

if TYPE_CHECKING:
    from .checks.finding import Finding

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def doctor(
    uri: Annotated[
        str | None, typer.Argument(metavar="URI", help="Repository, or an address for one, whose store to check.")
    ] = None,
    json: Json = False,
) -> None:
    """Check this machine and, with a URI, the store.

    Each line is ok, a warning (something will be slow or missing) or failed (something will not work), with the consequence. A
    missing Ray cluster or GPU is not a failure. In the store, objects below probe/ are written and deleted again. The exit code
    is that of the first failure.

    Example:  raystow doctor s3://bucket/runs/llama
    """
    found = []
    for finding in _findings(uri):
        found.append(finding)
        if not json:
            _print(finding)
    failed = [finding for finding in found if finding.status.value == "failed"]
    if json:
        checks = [{"name": f.name, "status": f.status.value, "found": f.found, "follows": f.follows} for f in found]
        emit({"uri": uri, "ok": not failed, "checks": checks})
    if failed:
        raise typer.Exit(failed[0].code)


def _findings(uri: str | None) -> Iterator[Finding]:
    from .checks import hardware, software
    from .checks.finding import examined

    yield from examined((*software.CHECKS, *hardware.CHECKS))
    if uri is not None:
        from .checks.store import check_store

        yield from check_store(uri)


def _print(finding: Finding) -> None:
    """Print a finding as soon as it is known: some checks take seconds."""
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_column(width=7, style=_STYLES[finding.status.value])
    line.add_column(width=18)
    line.add_column(overflow="fold")
    line.add_row(finding.status.value, finding.name, printable(finding.found))
    if finding.follows:
        line.add_row("", "", f"-> {printable(finding.follows)}", style="dim")
    out.print(line)
