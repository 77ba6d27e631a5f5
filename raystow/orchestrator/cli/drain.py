"""``raystow drain``: tell training that this node is going to be taken away, and wait for what it saves."""

from __future__ import annotations

from typing import Annotated

import typer

from . import quantities
from .present import emit, out, printable
from .target import Json


def drain(
    within: Annotated[str, typer.Option(metavar="TIME", help="When the node will be gone; no longer is waited: 90s, 5m.")] = "5m",
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for Ray's logs.")] = "the node is going to be taken away",
    node: Annotated[
        str | None, typer.Option(metavar="ID", help="Ray's id of another node than this one.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Tell training that a node is going to be taken away, and wait until its state is saved.

    For what is run before a node goes: a pod's preStop hook, a scheduler's notice. Ray is told that the node is being preempted:
    it starts nothing there any more, and `ray.train.get_preemption_info()` tells the training, which saves. Returns when a
    version that was begun after the notice is durable, or when the node's training has ended. Exits with 1 if neither happens
    in time. It ends no process.

    Example:  raystow drain --within 5m && ray stop
    """
    from ...storage.clock import SYSTEM
    from ...workers.node_actor import saves_on
    from .. import cluster, draining

    seconds = quantities.duration(within)
    cluster.connect()
    here = node or cluster.node_here()

    def announce() -> None:
        cluster.announce_end(here, seconds, reason)
        if not json:
            out.print(f"node {here} has {within} left", soft_wrap=True)

    done = draining.drain(lambda: saves_on(here), announce, SYSTEM, seconds=seconds)
    if json:
        emit({"node": here, "durable": list(done.durable), "left": list(done.left)})
        return
    for uri in done.durable:
        out.print(printable(f"saved: {uri}"), soft_wrap=True)
    for uri in done.left:
        out.print(printable(f"its training has ended: {uri}"), soft_wrap=True)
    if not done.durable and not done.left:
        out.print("nothing is saved from this node")
