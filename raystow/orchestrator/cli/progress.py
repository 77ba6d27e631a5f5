"""A bar of bytes on stderr, where a person is looking."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from .present import err


@contextlib.contextmanager
def byte_bar(title: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar that is gone at the end; yields what to call, from any thread, with bytes done. None is shown if ``quiet``,
    or if stderr is not a terminal."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        DownloadColumn(True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=quiet or not err.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda nbytes: progress.update(task, advance=nbytes)
