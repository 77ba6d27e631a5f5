"""``raystow drain``."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options
from .options import Json
from .output import emit, out, printable


def drain(
    within: Annotated[float, options.time(help="Time until the node ends, and the longest wait: 90s, 5m.")] = "5m",  # type: ignore[assignment]
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Reason for Ray's logs.")] = "the node is going to be removed",
    node: Annotated[str | None, typer.Option(metavar="ID", help="Ray id of the node; by default this one.")] = None,
    json: Json = False,
) -> None:
    """Announce that a node is going to be removed, and wait until its state is saved.

    For a pod's preStop hook or a scheduler's notice. Ray starts nothing new on the node, and `Checkpointer.due` returns true on
    all ranks. Returns when each repository of the node's ranks has a durable version begun after the notice, or when those ranks
    have ended; exits with 1 if that takes too long. A notice cannot be withdrawn.

    Example:  raystow drain --within 5m && ray stop
    """
    from ..orchestrator import ray_cluster
    from ..orchestrator.coordinator import drain
    from ..storage.runtime.clock import SYSTEM
    from ..workers.node.actor import saves_on

    connection = ray_cluster.connect()
    id = node or connection.node

    def announce() -> None:
        ray_cluster.announce_end(connection, id, within, reason)
        if not json:
            out.print(f"node {id} ends in {within:,.0f} s")

    done = drain.drain(lambda: saves_on(id), announce, SYSTEM, seconds=within)
    if json:
        emit({"node": id, "durable": done.durable, "left": done.left})
        return
    for uri in done.durable:
        out.print(printable(f"saved: {uri}"))
    for uri in done.left:
        out.print(printable(f"training ended: {uri}"))
    if not done.durable and not done.left:
        out.print("no process of this node saves to a repository")
