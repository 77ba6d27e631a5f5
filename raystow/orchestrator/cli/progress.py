"""A bar of what is done on stderr, where a person is looking."""

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

from .present import err


@contextlib.contextmanager
def byte_bar(title: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar that is gone at the end; yields what to call, from any thread, with bytes done. None is shown if ``quiet``,
    or if stderr is not a terminal."""
    with _shown(DownloadColumn(True), TransferSpeedColumn(), quiet=quiet) as progress:
        task = progress.add_task(title, total=total)
        yield lambda nbytes: progress.update(task, advance=nbytes)


@contextlib.contextmanager
def object_bar(title: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """The same for objects."""
    with _shown(MofNCompleteColumn(), quiet=quiet) as progress:
        task = progress.add_task(title, total=total)
        yield lambda objects: progress.update(task, advance=objects)


class VersionsBar:
    """How much of some versions is done. Made by ``versions_bar``."""

    def __init__(self, progress: Progress, sizes: Sequence[int]) -> None:
        self._progress, self._sizes, self._done = progress, sizes, 0
        self._task = progress.add_task(self._title(), total=sum(sizes))

    def advance(self, amount: int) -> None:
        """So much more of the version in work is done; from any thread."""
        self._progress.update(self._task, advance=amount)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """End a version, whatever was missing of it, and make way while something is printed about it."""
        self._progress.stop()
        yield
        self._done += 1
        self._progress.update(self._task, description=self._title(), completed=sum(self._sizes[: self._done]))
        self._progress.start()

    def _title(self) -> str:
        return f"{self._done} of {len(self._sizes)} versions done"


@contextlib.contextmanager
def versions_bar(sizes: Sequence[int], *, deep: bool, quiet: bool) -> Iterator[VersionsBar]:
    """The same for versions of these ``sizes`` in bytes: in bytes if they are read (``deep``), else each version is one step."""
    columns = (DownloadColumn(True), TransferSpeedColumn()) if deep else ()
    with _shown(*columns, quiet=quiet) as progress:
        yield VersionsBar(progress, sizes if deep else [1] * len(sizes))


def _shown(*columns: ProgressColumn, quiet: bool) -> Progress:
    title, eta = TextColumn("{task.description}", markup=False), TimeRemainingColumn()
    hidden = quiet or not err.is_terminal
    return Progress(title, BarColumn(20), *columns, eta, console=err, transient=True, disable=hidden)
