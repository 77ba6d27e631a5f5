"""The display of objects at a prompt and in a notebook, and the progress bar of a restore."""

from __future__ import annotations

import contextlib
import io

import pytest
from helpers.builders import memory_repository, whole, write
from helpers.polling import wait_until
from helpers.saves import save
from pyte import Screen, Stream

from raystow.orchestrator.client.pending import Pending
from raystow.orchestrator.restore import progress_bar
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import SaveFailed
from raystow.storage.format import keys


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_repository_and_a_version_are_shown_as_tables() -> None:
    import numpy as np

    repository = memory_repository()
    assert "0 versions" in repository._repr_html_()
    for _ in range(21):
        write(Committer(repository, "me"), {"w": whole(np.zeros(1000, np.float32))})
    html = repository._repr_html_()
    assert html.startswith("<table>")
    assert "21 versions, the newest 20" in html
    assert html.count("<tr>") == 21
    newest = repository.latest()
    assert newest is not None
    assert f"<b>version {newest.id}</b>" in newest._repr_html_()
    assert "3.91 KiB" in newest._repr_html_()


def test_a_damaged_repository_is_shown_with_its_problem() -> None:
    repository = memory_repository()
    repository.store.put(keys.ROOT, [b"{}"])
    assert "does not match its own digest" in repository._repr_html_()


def test_a_pending_save_shows_its_state_and_escapes_errors() -> None:
    outcome = save(7)
    pending = Pending(outcome)
    assert repr(pending) == "Pending(step=7, in flight)"
    outcome.progress.note_staged()
    assert repr(pending) == "Pending(step=7, in flight, staged)"
    outcome.report(SaveFailed("<script>"))
    assert repr(pending) == "Pending(step=7, failed)"
    assert "&lt;script&gt;" in pending._repr_html_()


def test_a_restore_shows_a_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    with contextlib.redirect_stderr(terminal), progress_bar.shown("restoring version 3", 2000, rank=0, after=0) as report:
        report(1000)
        wait_until(lambda: "restoring version 3" in terminal.getvalue(), "the bar appears")
    screen = Screen(100, 5)
    Stream(screen).feed(terminal.getvalue())
    assert not "".join(screen.display).strip(), "the bar is removed"


@pytest.mark.parametrize(("rank", "after", "terminal"), [(1, 0, Terminal()), (0, 60, Terminal()), (0, 0, io.StringIO())])
def test_no_bar_for_other_ranks_short_restores_or_files(rank: int, after: float, terminal: io.StringIO) -> None:
    with contextlib.redirect_stderr(terminal), progress_bar.shown("restoring", 2000, rank=rank, after=after) as report:
        report(1000)
    assert terminal.getvalue() == ""
