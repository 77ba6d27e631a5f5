"""Progress bars on stderr, shown only on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from .output import err


@contextlib.contextmanager
def progress_bar(title: str, total: int | None, *, quiet: bool, of_bytes: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a bar for ``total`` bytes or objects, or for an unknown number, while the block runs, unless ``quiet``; yields a
    function that any thread may call with what was done."""
    with _bar(quiet=quiet, of_bytes=of_bytes) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, advance=done)


class VersionsBar:
    """The progress over several versions; made by ``versions_bar``."""

    def __init__(self, progress: Progress, sizes: Sequence[int]) -> None:
        self._progress, self._sizes, self._done = progress, sizes, 0
        self._task = progress.add_task(self._title(), total=sum(sizes))

    def advance(self, amount: int) -> None:
        """Add to what is done of the current version; from any thread."""
        self._progress.update(self._task, advance=amount)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Mark the current version as done, and hide the bar while the block prints about it."""
        self._progress.stop()
        yield
        self._done += 1
        self._progress.update(self._task, description=self._title(), completed=sum(self._sizes[: self._done]))
        self._progress.start()

    def _title(self) -> str:
        return f"{self._done} of {len(self._sizes)} versions done"


@contextlib.contextmanager
def versions_bar(sizes: Sequence[int], *, deep: bool, quiet: bool) -> Iterator[VersionsBar]:
    """Show a bar over versions of these ``sizes`` in bytes; if not ``deep``, each version counts as one step."""
    with _bar(quiet=quiet, of_bytes=deep) as progress:
        yield VersionsBar(progress, sizes if deep else [1] * len(sizes))


def _bar(*, quiet: bool, of_bytes: bool) -> Progress:
    amounts: tuple[ProgressColumn, ...] = (DownloadColumn(True), TransferSpeedColumn()) if of_bytes else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(20), *amounts, TimeRemainingColumn())
    return Progress(*columns, console=err, transient=True, disable=quiet or not err.is_terminal)
