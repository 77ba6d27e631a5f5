"""A progress bar for restores that take seconds, in a terminal or notebook; nothing in logs."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from ...storage.runtime import background
from .plan import Progress, silent

_APPEARS = 2.0  # seconds


@contextlib.contextmanager
def shown(title: str, total: int, *, rank: int, after: float = _APPEARS) -> Iterator[Progress]:
    """Show a bar for ``total`` bytes on rank 0 if the block takes longer than ``after`` seconds. Yields a function that any
    thread calls with what was done."""
    if rank != 0 or not _interactive():
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(20), DownloadColumn(True), TransferSpeedColumn())
    bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True, markup=False, emoji=False), transient=True)
    task, ended = bar.add_task(title, total=total), threading.Event()

    def appear() -> None:
        if not ended.wait(after):
            bar.start()

    waiting = background.start("raystow-progress", appear)
    try:
        yield lambda nbytes: bar.advance(task, nbytes)
    finally:
        ended.set()
        waiting.join()
        bar.stop()


def _interactive() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules
