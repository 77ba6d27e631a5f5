"""The preparation of a first save, in the background."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from helpers.polling import wait_until
from helpers.saves import Cluster

from raystow.orchestrator.client.node_connection import NodeConnection
from raystow.orchestrator.client.options import Compression, Memory, Replication
from raystow.state.planner import SavePlan, plan_save


@pytest.mark.parametrize("state", [{"f": object()}, None])
def test_a_state_that_cannot_be_planned_is_logged(state: Any, caplog: pytest.LogCaptureFixture) -> None:
    """``restore`` has filled the state by then, and does not raise."""
    planned: list[threading.Thread] = []

    def plan() -> SavePlan:
        planned.append(threading.current_thread())
        return plan_save(state, rank=0, world_size=1)

    cluster: Any = Cluster()
    NodeConnection(cluster, (Memory(), Compression(), Replication()), codec="cpu").prepare(plan)
    wait_until(lambda: "the first save is not prepared, and will take longer" in caplog.text, "the warning")
    assert planned != [threading.current_thread()]


def test_a_state_without_a_plan_is_not_prepared() -> None:
    cluster: Any = Cluster()
    connection, asked = NodeConnection(cluster, (Memory(), Compression(), Replication()), codec="cpu"), threading.Event()
    connection.prepare(lambda: asked.set())
    assert asked.wait(60)
    assert not connection.made
