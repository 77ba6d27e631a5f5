"""``raystow plan``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..orchestrator.restore.what_if import MOST_RANKS, Reads, plan_world
from ..storage.versions.version_selector import LATEST
from . import options
from .options import Json, Uri, Which, number
from .output import count, duration, emit, fields_of, out, say, size, table
from .target import open_target

if TYPE_CHECKING:
    from ..orchestrator.coordinator.journal_reach import JournalReach

_SPLIT = "a tensor saved in several boxes along a dimension is split evenly along it again; every rank reads all others whole"
_WHOLE = "every rank reads every tensor whole"


def plan(
    uri: Uri,
    version: Which = LATEST,
    world: Annotated[int | None, number(max=MOST_RANKS, help="Ranks that restore; by default those that saved.")] = None,
    per_node: Annotated[int, number(help="Ranks per node.")] = 8,
    rate: Annotated[int, options.size(help="Bytes per second that a node reads from the store.")] = "1GB",  # type: ignore[assignment]
    peer_rate: Annotated[int, options.size(help="Bytes per second that a node reads from other nodes.")] = "1GB",  # type: ignore[assignment]
    replicated: Annotated[bool, typer.Option("--replicated", help="Every rank reads every tensor whole, as with DDP.")] = False,
    json: Json = False,
) -> None:
    """Compute which step N ranks would reach in a restore, what each would read of the version, and how long that takes.

    Reads the version's record and manifest and, for the latest version, the steps in the journal, from the store and from a Ray
    cluster that runs here. Steps of another number of ranks count as if the optimizer acted element by element. The output states
    the assumed split of tensors. A node reads each stored byte once for all its ranks, and passes chunks on to other nodes that
    need them. Versions in the nodes' memory are not counted.

    Example:  raystow plan s3://bucket/runs/llama --world 64
    """
    if not (rate and peer_rate):
        raise typer.BadParameter("--rate and --peer-rate must be positive")
    target = open_target(uri)
    chosen = target.version(version)
    ranks = world or chosen.world_size
    made = plan_world(chosen, ranks, per_node=per_node, whole=replicated)
    assumption, passed_on = _WHOLE if replicated else _SPLIT, round(sum(node.passed_on for node in made.nodes))
    seconds = made.seconds(store=rate, peer=peer_rate)
    reach = None
    if version == LATEST:
        from ..orchestrator.coordinator.journal_reach import journal_reach  # imports Ray

        reach = journal_reach(target.repository, target.root, chosen.step, ranks)
    if json:
        emit(
            {
                "uri": target.uri,
                "version": chosen.id,
                "step": chosen.step,
                "saved_by": chosen.world_size,
                "world": ranks,
                "per_node": per_node,
                "assumption": assumption,
                "stored": chosen.bytes,
                "bytes": made.store.nbytes,
                "passed_on": passed_on,
                "amplification": round(made.amplification, 4),
                "rate": rate,
                "peer_rate": peer_rate,
                "seconds": round(seconds, 3),
                "nodes": [_fields(node) for node in made.nodes],
                "ranks": [_fields(rank) for rank in made.ranks],
                "journal": reach and fields_of(reach),
            }
        )
        return
    out.print(f"version {chosen.id} (step {chosen.step}) onto {count(ranks, 'rank')}, {per_node} per node", style="bold")
    say(f"saved by {count(chosen.world_size, 'rank')}; assumption: {assumption}")
    out.print()
    rows = [row for title, reads in (("each rank", made.ranks), ("each node", made.nodes)) for row in _spread(title, reads)]
    out.print(table("", ["", "", ">MIN", ">MEDIAN", ">MAX"], rows))
    out.print()
    total = f"{size(made.store.nbytes)} from the store, {made.amplification:.3f} times what is needed, for {size(chosen.bytes)}"
    say(f"in total {total} stored; {size(passed_on)} passed on between nodes")
    say(f"about {duration(seconds)} at {size(rate)} per second and node from the store, and {size(peer_rate)} from other nodes")
    if reach is not None:
        say(_reach_text(reach))


def _reach_text(reach: JournalReach) -> str:
    """The step that a restore reaches, from where, and why no later one."""
    text = f"a restore reaches step {reach.step}"
    if reach.entries:
        nodes = ", ".join(f"{node[:8]} has {number}" for node, number in reach.nodes.items())
        text += f" by {reach.entries} journal entries, {size(reach.bytes)} ({nodes})"
    else:
        text += "; there are no later steps in the journal that can be replayed"
    text += f"; {reach.end}" if reach.end else ""
    return text if reach.cluster else f"{text}; the nodes of a Ray cluster, which may have more, were not asked: {reach.why_not}"


def _fields(reads: Reads) -> dict[str, object]:
    fields = fields_of(reads)
    return {"bytes": fields.pop("nbytes"), **fields, "needed": round(reads.needed), "passed_on": round(reads.passed_on)}


def _spread(title: str, reads: Sequence[Reads]) -> list[list[str]]:
    """A row each for bytes, chunks and requests."""

    def row(name: str, of: Callable[[Reads], int], show: Callable[[float], str]) -> list[str]:
        found = [of(one) for one in reads]
        return [name, *(show(number) for number in (min(found), statistics.median(found), max(found)))]

    return [
        [title, *row("bytes", lambda one: one.nbytes, size)],
        ["", *row("chunks", lambda one: one.chunks, "{:,.0f}".format)],
        ["", *row("requests", lambda one: one.requests, "{:,.0f}".format)],
    ]
