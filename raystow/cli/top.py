"""``raystow top``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.live import Live

from ..orchestrator.coordinator.status import ClusterStatus
from ..storage.runtime.clock import SYSTEM, Clock
from ..storage.stores import open_store
from . import options
from .options import Json
from .output import emit, fields_of, out
from .top_data import RunState, run_of, run_state
from .top_view import view

_OTHER_LINES = 14  # besides nodes and failures
_MIN_INTERVAL = 0.2  # seconds


def top(
    uri: Annotated[str | None, typer.Argument(metavar="URI", help="Repository; may be omitted if there is one run.")] = None,
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Ray cluster; by default this machine's.")] = "auto",
    interval: Annotated[float, options.time(help="Time between updates.")] = "1s",  # type: ignore[assignment]
    once: Annotated[bool, typer.Option("--once", help="Print once and exit; the default if stdout is no terminal.")] = False,
    json: Json = False,
) -> None:
    """Show the saves in progress on a cluster, live until Ctrl-C.

    WAITS FOR: ranks without staged shards, nodes without stored shards, or the commit. BEGUN, CODED, STORED: ranks that began and
    are coded, nodes that are durable. STAGE: of the slowest rank of the node. UP: uploads in progress. QUEUE: bytes being coded
    or uploaded, in percent of the limit: at 100 % saves wait. MEMORY, COPIES: bytes cached for restores, and their share on other
    nodes. Runs on any machine of the Ray cluster and only reads.

    Example:  raystow top s3://bucket/runs/llama
    """
    from ..orchestrator.coordinator.cluster_probe import ClusterProbe
    from ..orchestrator.coordinator.ray_client import coordinator_name

    name = coordinator_name(open_store(uri).uri) if uri else ""
    states = watch(ClusterProbe(address).look, name, SYSTEM, max(_MIN_INTERVAL, interval))
    if json or once or not out.is_terminal:
        next(states)  # rates need two observations
        state = next(states)
        emit(fields_of(state)) if json else out.print(view(state))
        return
    try:
        with Live(view(next(states), rows=out.height - _OTHER_LINES), console=out, screen=True, auto_refresh=False) as live:
            for state in states:
                live.update(view(state, rows=out.height - _OTHER_LINES), refresh=True)
    except KeyboardInterrupt:
        pass  # the way to exit


def watch(look: Callable[[], ClusterStatus], name: str, clock: Clock, interval: float) -> Iterator[RunState]:
    """Observe a run every ``interval`` seconds by ``look``; while its coordinator does not answer, its last status is repeated.

    Raises:
        ClusterError: there is no such run at the first observation.
    """
    before = look()
    name = run_of(before, name)
    known = before.coordinators[name]
    yield run_state(name, before, before, known)
    while True:
        clock.sleep(interval)
        now = look()
        known = now.coordinators.get(name) or known
        yield run_state(name, before, now, known)
        before = now if now.nodes else before
