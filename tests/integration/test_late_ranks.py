"""A rank that others wait for is named in their logs long before the save or restore is given up."""

from __future__ import annotations

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from helpers.builders import layers
from helpers.polling import wait_until

import raystow
from integration.ranks import Rank, every, save_state, start, take
from raystow.orchestrator import late_ranks
from raystow.orchestrator.coordinator import attempts
from raystow.orchestrator.coordinator.ray_client import coordinator_name
from raystow.orchestrator.restore import round as restore_round
from raystow.orchestrator.restore import rounds
from raystow.storage.stores import open_store
from raystow.workers.node.actor import NAMESPACE

pytestmark = pytest.mark.usefixtures("cluster")


def _warn_soon(_: Any) -> None:
    attempts.LATE = late_ranks.LATE = restore_round.LATE = rounds.LATE = 0.5


def _warnings(rank: Rank) -> tuple[str, ...]:
    return rank.pending[0].warnings


def _restore_in_thread(rank: Rank) -> None:
    """Restore, and collect what is logged meanwhile."""
    rank.logged = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: rank.logged.append(record.getMessage())
    logging.getLogger("raystow").addHandler(handler)

    def restore() -> Any:
        try:
            return rank.restore()
        finally:
            logging.getLogger("raystow").removeHandler(handler)

    rank.restoring = ThreadPoolExecutor(1).submit(restore)


def _logged(rank: Rank) -> str:
    return "\n".join(rank.logged)


def _restored(rank: Rank) -> int:
    return rank.restoring.result(60).step


def _warn_soon_in(folder: Path) -> None:
    """Let the coordinator warn after half a second."""
    actor = ray.get_actor(coordinator_name(open_store(str(folder)).uri), NAMESPACE)
    ray.get(actor.__ray_call__.remote(_warn_soon), timeout=60)


def test_the_ranks_that_save_learn_who_does_not(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2)
    _warn_soon_in(tmp_path)
    every(ranks, "set", layers, 1, 1000)
    every(ranks[1:], "save", 1)
    wait_until(lambda: every(ranks[1:], "do", _warnings)[0], "a warning while rank 1 waits")
    (text, *_), *_ = every(ranks[1:], "do", _warnings)
    assert "rank 0 (process " in text
    assert "has not called save for" in text
    assert text.endswith("; rank 1 waits")
    every(ranks[:1], "save", 1)
    assert [version.step for version in every(ranks, "result")] == [1, 1]


def test_a_late_rank_learns_at_once_that_the_other_gave_up(tmp_path: Path) -> None:
    """Not after its own timeout, for which this test would not wait."""
    first, late = [take(node) for node in ("node_a", "node_b")]
    begin = [(first, 0, {"timeout": 3.0}), (late, 1, {"timeout": 3600.0})]
    ray.get([rank.begin.remote(str(tmp_path), n, 2, options) for rank, n, options in begin], timeout=120)
    every([first, late], "set", layers, 1, 1000)
    every([first, late], "save", 1)
    every([first, late], "result")
    said = r"rank 1 \(process \d+ on .*\) has not called restore for \d+ s; rank 0 gave up at \d\d:\d\d:\d\d UTC"
    for rank in (first, late):
        with pytest.raises(raystow.DeadlineExceeded, match=said):
            every([rank], "restore")
    assert [version.step for version in every([first, late], "restore")] == [1, 1]


def test_the_log_of_a_rank_that_restores_names_the_other(tmp_path: Path) -> None:
    ranks = start(str(tmp_path), 2)
    _warn_soon_in(tmp_path)
    save_state(ranks, 1, layers, 1000)
    every(ranks[1:], "do", _restore_in_thread)
    wait_until(lambda: "waits" in every(ranks[1:], "do", _logged)[0], "a warning while rank 1 waits")
    (said,) = every(ranks[1:], "do", _logged)
    assert re.search(r"restore: rank 0 \(process \d+ on .*\) has not called restore for \d+ s; rank 1 waits", said)
    every(ranks[:1], "do", _restore_in_thread)
    assert every(ranks, "do", _restored) == [1, 1]
