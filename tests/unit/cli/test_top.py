"""The text and the screen of ``raystow top`` for handmade snapshots, on a terminal and with missing parts of the cluster."""

from __future__ import annotations

import functools
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyte
import pytest
from helpers.cluster_snapshots import NAME, OVERVIEW, RUN, FixedProbe, node, snapshot
from msgspec.structs import replace
from rich.console import Console

from raystow.cli.top import watch
from raystow.cli.top_data import RunState, run_of, run_state
from raystow.cli.top_view import view
from raystow.orchestrator.coordinator.status import ClusterStatus
from raystow.storage.errors import ClusterError, StateError
from raystow.storage.runtime.clock import SYSTEM, Clock
from raystow.workers.protocol.messages import (
    CoordinatorStatus,
)


def shown(state: RunState, rows: int | None = None) -> list[str]:
    console = Console(width=80, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(view(state, rows=rows))
    return capture.get().splitlines()


def test_rates_are_differences_between_snapshots() -> None:
    before, now = snapshot(node(1, at=10.0, raw=1 << 30)), snapshot(node(1, at=12.0, raw=3 << 30))
    (told,) = run_state(NAME, before, now, OVERVIEW).nodes
    assert (told.coded_per_second, told.stored_per_second) == (1 << 30, 3 << 28)
    (restarted,) = run_state(NAME, now, snapshot(node(1, at=13.0, raw=0)), OVERVIEW).nodes
    assert restarted.coded_per_second is None
    (new,) = run_state(NAME, snapshot(), now, OVERVIEW).nodes
    assert new.coded_per_second is None


def test_only_the_nodes_of_the_run_are_listed() -> None:
    other = node(5, ranks={"s3://other": 8})
    assert [n.node for n in run_state(NAME, snapshot(), snapshot(node(1), other), OVERVIEW).nodes] == [node(1).node]


def test_nodes_and_ranks_show_their_stage_slowest_first() -> None:
    now = snapshot(node(1), node(2), node(3), None)
    lines = shown(run_state(NAME, now, now, OVERVIEW))
    stages = [line.split()[:3] for line in lines[lines.index(next(line for line in lines if line.startswith("NODE"))) + 1 :][:4]]
    assert stages == [
        ["dead", "no", "answer"],
        ["00000002", "8", "staging"],
        ["00000001", "8", "coded"],
        ["00000003", "8", "stored"],
    ]
    assert "ranks of save 42: staging 16-18; coded 8-15, 19-31" in lines


def test_the_view_fits_80_columns_and_the_given_height() -> None:
    many_nodes = snapshot(*(node(number) for number in range(1, 200)))
    told = run_state(NAME, many_nodes, many_nodes, OVERVIEW)
    for rows in (None, 10):
        assert max(map(len, shown(told, rows))) <= 80
    lines = shown(told, 10)
    assert "(and 190 nodes more)" in lines
    assert len([line for line in lines if line.startswith("0000")]) == 9


def test_failures_are_shown_in_full() -> None:
    text = " ".join(shown(run_state(NAME, snapshot(), snapshot(), OVERVIEW)))
    assert "1 min ago, step 4000: ranks [3, 7] had not delivered their shards after 600 s" in text
    assert "1 aborted since" in text


def test_a_run_without_a_version_is_shown() -> None:
    first_status = CoordinatorStatus(RUN, "r" * 16, 1, None, None, 0, (), ())
    assert "newest   no version yet" in shown(run_state(NAME, snapshot(), snapshot(coordinator=first_status), first_status))


class NoSleepClock(Clock):
    def sleep(self, seconds: float) -> None:
        pass


def test_the_last_status_stays_while_the_coordinator_restarts() -> None:
    gone = snapshot(node(1, at=11.0, raw=1 << 30), coordinator=None)
    head_down = ClusterStatus(102.0, {}, {}, trouble="the head node does not answer: no")
    back = snapshot(node(1, at=20.0, raw=10 << 30), coordinator=replace(OVERVIEW, epoch=8))
    updates = watch(FixedProbe(snapshot(node(1)), gone, head_down, back).look, "", NoSleepClock(), 1.0)
    first, restarting, down, again = (next(updates) for _ in range(4))
    assert [f.coordinator.answers for f in (first, restarting, down, again)] == [True, False, False, True]
    assert restarting.newest.id == 41
    assert any("the coordinator does not answer" in line for line in shown(restarting))
    assert restarting.nodes[0].coded_per_second == 1 << 30
    assert any("the head node does not answer" in line for line in shown(down))
    assert again.coordinator.epoch == 8
    assert again.nodes[0].coded_per_second == 1 << 30  # relative to the last snapshot with the node


def test_a_run_is_found_or_must_be_selected() -> None:
    two = ClusterStatus(1.0, {NAME: OVERVIEW, "coordinator-2": replace(OVERVIEW, uri="s3://b/2")}, {})
    assert run_of(two, "coordinator-2") == "coordinator-2"
    with pytest.raises(StateError, match=r"several jobs .*s3://b/2"):
        run_of(two, "")
    running = ClusterStatus(1.0, two.coordinators, {"n": node(1, ranks={"s3://b/2": 8})})
    assert run_of(running, "") == "coordinator-2"  # the other job has ended
    with pytest.raises(ClusterError, match=r"no job saves to it .*s3://b/2"):
        run_of(two, "coordinator-3")
    endpoints = {"coordinator-3-a": OVERVIEW, "coordinator-3-b": OVERVIEW}
    assert run_of(ClusterStatus(1.0, {"coordinator-3-a": OVERVIEW}, {}), "coordinator-3") == "coordinator-3-a"
    with pytest.raises(StateError, match="2 jobs save to this address in different stores"):
        run_of(ClusterStatus(1.0, endpoints, {}), "coordinator-3")
    with pytest.raises(ClusterError, match="no job saves"):
        run_of(ClusterStatus(1.0, {}, {}), "")
    with pytest.raises(ClusterError, match="the head is away"):
        run_of(ClusterStatus(1.0, {}, {}, trouble="the head is away"), "")


# On a real terminal

PROGRAM = """
import sys; sys.path.insert(0, {tests!r})
from helpers.cluster_snapshots import FixedProbe, snapshot, node
from raystow.cli import top
from raystow.orchestrator.coordinator import cluster_probe
from typer import Typer, run
cluster_probe.ClusterProbe = lambda address: FixedProbe(snapshot(node(1)), snapshot(node(1, at=11.0, raw=2 << 30), node(2), None))
app = Typer(); app.command()(top.top)
sys.argv[1:] = ["--interval", "0.2s"]
app(standalone_mode=False)
print("ended well")
"""


def until(screen: pyte.Screen, stream: pyte.ByteStream, terminal: int, text: str) -> None:
    end = SYSTEM.monotonic() + 60
    while not any(text in line for line in screen.display):
        assert SYSTEM.monotonic() < end, "\n".join(screen.display)
        if select.select([terminal], [], [], 0.2)[0]:
            stream.feed(os.read(terminal, 1 << 16))


@pytest.fixture
def live() -> Iterator[tuple[pyte.Screen, pyte.ByteStream, int, subprocess.Popen[bytes]]]:
    """Start ``raystow top`` on a terminal of 80 columns and 30 rows."""
    outer, inner = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "30"}
    program = PROGRAM.format(tests=str(Path(__file__).parents[2]))
    # A background job of a shell ignores Ctrl-C, and its child processes inherit this. This process must handle Ctrl-C in any
    # case.
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=environment, preexec_fn=listen)
    os.close(inner)
    screen = pyte.Screen(80, 30)
    try:
        yield screen, pyte.ByteStream(screen), outer, process
    finally:
        process.kill()
        process.wait()
        os.close(outer)


def test_live_on_a_terminal_until_ctrl_c(live: tuple[pyte.Screen, pyte.ByteStream, int, subprocess.Popen[bytes]]) -> None:
    screen, stream, terminal, process = live
    for text in ("storing 1.50 GiB/s", "no answer"):  # the screen arrives in parts
        until(screen, stream, terminal, text)
    lines = [line.rstrip() for line in screen.display]
    assert lines[0] == RUN
    assert any(line.startswith("dead") and "no answer" in line for line in lines)
    assert "coding 2.00 GiB/s, storing 1.50 GiB/s" in next(line for line in lines if line.startswith("nodes"))
    process.send_signal(signal.SIGINT)
    until(screen, stream, terminal, "ended well")
    assert process.wait(30) == 0
    assert not any("Traceback" in line for line in screen.display)
