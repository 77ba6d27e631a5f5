"""``raystow doctor``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.table import Table

from .checks import hardware, software
from .checks.finding import Finding, Status, examined
from .checks.store import check_store
from .options import Json
from .output import emit, out, printable

_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "bold red"}


def doctor(
    uri: Annotated[
        str | None, typer.Argument(metavar="URI", help="Repository, or an address for one, whose store to check.")
    ] = None,
    json: Json = False,
) -> None:
    """Check this machine and, with a URI, the store.

    Each line is ok, a warning (something is slow or missing) or failed (something will not work). A missing Ray cluster or GPU is
    no failure. In the store, objects below probe/ are written and deleted. The first failure determines the exit code.

    Example:  raystow doctor s3://bucket/runs/llama
    """
    found = []
    for name, finding in _findings(uri):
        found.append((name, finding))
        if not json:
            _print(name, finding)
    failed = [finding for _, finding in found if finding.status is Status.FAILED]
    if json:
        checks = [{"name": name, "status": f.status.value, "found": f.found, "follows": f.follows} for name, f in found]
        emit({"uri": uri, "ok": not failed, "checks": checks})
    if failed:
        raise typer.Exit(failed[0].code)


def _findings(uri: str | None) -> Iterator[tuple[str, Finding]]:
    yield from examined(software.CHECKS | hardware.CHECKS)
    if uri is not None:
        yield from check_store(uri)


def _print(name: str, finding: Finding) -> None:
    """Print a finding as soon as it is known: some checks take seconds."""
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_column(width=7, style=_STYLES[finding.status])
    line.add_column(width=18)
    line.add_column(overflow="fold")
    line.add_row(finding.status.value, name, printable(finding.found))
    if finding.follows:
        line.add_row("", "", f"-> {printable(finding.follows)}", style="dim")
    out.print(line)
