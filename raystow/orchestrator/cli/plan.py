"""``raystow plan``: what ranks of another world would read of a version, without restoring anything."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .present import count, emit, out, say, size, table
from .quantities import nbytes
from .target import LATEST, Json, Uri, Which, open_target

if TYPE_CHECKING:
    from ..world_plan import Reads

_SPLIT = "a tensor saved in several boxes along a dimension is split evenly along it again; every rank reads all others whole"
_WHOLE = "every rank reads every tensor whole"


def plan(
    uri: Uri,
    version: Which = LATEST,
    world: Annotated[
        int | None, typer.Option(min=1, max=1 << 17, metavar="N", help="Ranks that restore; by default as many as saved.")
    ] = None,
    per_node: Annotated[int, typer.Option(min=1, metavar="N", help="Ranks on each node.")] = 8,
    rate: Annotated[
        int, typer.Option(parser=nbytes, metavar="SIZE", help="What a node reads from the store in a second.")
    ] = "1GB",  # type: ignore[assignment]
    peer_rate: Annotated[
        int, typer.Option(parser=nbytes, metavar="SIZE", help="What a node takes from other nodes in a second.")
    ] = "1GB",  # type: ignore[assignment]
    replicated: Annotated[bool, typer.Option("--replicated", help="Every rank reads every tensor whole, as with DDP.")] = False,
    json: Json = False,
) -> None:
    """Tell what each of N ranks would read of a version, and how long that takes from the store.

    Restores nothing, needs no cluster, and reads the version's record and manifest only. How other ranks hold the tensors is not
    known: the assumption that is made is printed.

    Example:  raystow plan s3://bucket/runs/llama --world 64
    """
    from ..restore_plan import Rates
    from ..world_plan import plan_world

    if not (rate and peer_rate):
        raise typer.BadParameter("--rate and --peer-rate must be more than nothing")
    target = open_target(uri)
    chosen = target.version(version)
    ranks = world or chosen.world_size
    made = plan_world(chosen, ranks, per_node=per_node, whole=replicated)
    facts: dict[str, Any] = {
        "uri": target.repository.uri,
        "version": chosen.id,
        "step": chosen.step,
        "saved_by": chosen.world_size,
        "world": ranks,
        "per_node": per_node,
        "assumption": _WHOLE if replicated else _SPLIT,
        "stored": chosen.bytes,
        "bytes": made.store.nbytes,
        "passed_on": sum(node.passed_on for node in made.nodes),
        "amplification": round(made.amplification, 4),
        "rate": rate,
        "peer_rate": peer_rate,
        "seconds": round(made.seconds(Rates(peer=peer_rate, store=rate)), 3),
        "nodes": [_fields(node) for node in made.nodes],
        "ranks": [_fields(rank) for rank in made.ranks],
    }
    if json:
        emit(facts)
        return
    out.print(f"version {chosen.id} (step {chosen.step}) onto {count(ranks, 'rank')}, {per_node} on a node", style="bold")
    say(f"saved by {count(chosen.world_size, 'rank')}; assumed: {facts['assumption']}")
    out.print()
    rows = [row for who, of in (("each rank", made.ranks), ("each node", made.nodes)) for row in _spread(who, of)]
    out.print(table("", ["", "", ">MIN", ">MEDIAN", ">MAX"], rows))
    out.print()
    total = f"{size(made.store.nbytes)} from the store, {made.amplification:.3f} times what is needed, for {size(chosen.bytes)}"
    say(f"in all {total} stored; {size(facts['passed_on'])} passed on from node to node")
    speeds = f"{size(rate)} a second for each node from the store, and {size(peer_rate)} from other nodes"
    say(f"about {facts['seconds']:,.1f} s at {speeds}")


def _fields(reads: Reads) -> dict[str, Any]:
    fields = asdict(reads)
    return {"bytes": fields.pop("nbytes"), **fields, "needed": round(reads.needed)}


def _spread(who: str, reads: Sequence[Reads]) -> list[list[str]]:
    """A row each for bytes, chunks and reads."""

    def row(name: str, of: Callable[[Reads], int], show: Callable[[float], str]) -> list[str]:
        found = [of(one) for one in reads]
        return [name, *(show(number) for number in (min(found), statistics.median(found), max(found)))]

    def plain(number: float) -> str:
        return f"{number:,.0f}"

    return [
        [who, *row("bytes", lambda one: one.nbytes, size)],
        ["", *row("chunks", lambda one: one.chunks, plain)],
        ["", *row("requests", lambda one: one.requests, plain)],
    ]
