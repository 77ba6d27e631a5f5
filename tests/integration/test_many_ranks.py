"""More ranks than an actor serves calls at a time by default."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from helpers.builders import layers
from helpers.processes import incarnation

import raystow
from integration.ranks import every, save_state, start
from raystow.orchestrator.coordinator.ray_client import coordinator_actor
from raystow.workers.protocol import messages
from raystow.workers.protocol.messages import PROTOCOL, RestoreChoice, RestoreVote

RANKS = 10_100


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_more_than_ten_thousand_ranks_agree(tmp_path: Path) -> None:
    """The coordinator answers no rank before the last one votes."""
    (rank,) = start(str(tmp_path), 1)
    save_state([rank], 1, layers, 100)
    every([rank], "leave")
    ray.kill(coordinator_actor(tmp_path.as_uri()))
    coordinator = coordinator_actor(tmp_path.as_uri())
    repository = raystow.open(str(tmp_path)).id
    processes = [incarnation(f"process {rank}", repository) for rank in range(RANKS)]
    votes = [messages.encode(RestoreVote(rank, RANKS, process, 1, 60.0)) for rank, process in enumerate(processes)]
    answers = ray.get([coordinator.handle.remote(PROTOCOL, vote) for vote in votes], timeout=50)
    (shared,) = {choice for _, choice in answers}  # one object in the object store, not a message to each rank
    assert {data for data, _ in answers} == {b""}
    assert messages.decode(ray.get(shared), RestoreChoice).entry.id == 1
