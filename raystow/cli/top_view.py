"""The screen of ``raystow top``: 80 columns wide and as high as the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from ..orchestrator.coordinator.attempt import Phase
from ..workers.protocol.messages import STAGES, OpenAttempt
from .output import age, count, printable, ratio_text, size, table
from .top_data import NodeRow, RunState, SilentNode

_WAITS_FOR = {
    Phase.GATHERING.value: "ranks",
    Phase.COMPARING.value: "nodes",
    Phase.SEALING.value: "nodes",
    Phase.READY.value: "the commit",
}


def view(state: RunState, *, rows: int | None = None) -> RenderableType:
    """Return the screen, with at most ``rows`` nodes and failures; the nodes that others wait for come first."""
    parts: list[RenderableType] = [*_head(state)]
    if state.saves:
        parts += [Text(), _saves(state.saves)]
    nodes = sorted(state.nodes, key=_behind)
    limit = len(nodes) if rows is None else max(1, rows - min(3, len(state.failures)))
    if nodes:
        headers = ["NODE", ">RANKS", "STAGE", ">CODED/s", ">STORED/s", ">UP", ">QUEUE", ">MEMORY", ">COPIES"]
        parts += [Text(), table("", headers, map(_node_cells, nodes[:limit]))]
        if nodes[limit:]:
            parts.append(Text(f"(and {count(len(nodes) - limit, 'node')} more)", style="dim"))
        parts += _ranks(nodes)
    if state.failures:
        parts += [Text(), Text("aborted", style="dim")]
        for failure in state.failures if rows is None else state.failures[:3]:
            parts.append(Text(printable(f"{age(failure.ago)} ago, step {failure.step}: {failure.reason}"), style="red"))
    return Group(*parts)


def _head(state: RunState) -> Iterator[Text]:
    yield Text(printable(state.uri or "a run whose coordinator has not answered yet"), style="bold")
    if state.trouble:
        yield Text(printable(state.trouble), style="bold red")
    elif not state.coordinator.answers:
        yield Text("the coordinator does not answer and may be restarting; its last status follows", style="bold red")
    newest = state.newest
    if newest is None:
        yield Text("newest   no version yet")
    else:
        stored = f"{size(newest.stored)} (ratio {ratio_text(newest.stored, newest.raw)})"
        yield Text(f"newest   version {newest.id}, step {newest.step}, {age(newest.age)} ago, {stored}")
    aborted = state.aborted_in_a_row
    yield Text(f"saves    {len(state.saves)} in progress, {aborted} aborted since", style="bold red" if aborted else "")
    answering = [node for node in state.nodes if isinstance(node, NodeRow)]
    coding = sum(node.coded_per_second or 0 for node in answering)
    storing = sum(node.stored_per_second or 0 for node in answering)
    rates = f"coding {size(coding)}/s, storing {size(storing)}/s"
    yield Text(f"nodes    {len(state.nodes)} with {count(sum(node.ranks for node in answering), 'rank')}, {rates}")


def _saves(saves: Iterable[OpenAttempt]) -> RenderableType:
    rows = [
        [
            str(save.id),
            str(save.step),
            _WAITS_FOR[save.phase],
            f"{save.begun}/{save.world_size}",
            f"{save.finished}/{save.world_size}" if save.begun else "-",
            f"{save.stored}/{save.nodes}",
            age(save.age),
            age(save.left),
        ]
        for save in saves
    ]
    return table("", [">SAVE", ">STEP", "WAITS FOR", ">BEGUN", ">CODED", ">STORED", ">AGE", ">LEFT"], rows)


def _node_cells(node: NodeRow | SilentNode) -> list[str]:
    if isinstance(node, SilentNode):
        return [node.node[:8], "", "no answer", "", "", "", "", "", ""]
    return [
        node.node[:8],
        str(node.ranks),
        _stage(node),
        size(node.coded_per_second or 0),
        size(node.stored_per_second or 0),
        str(node.uploads),
        _percent(node.queue, node.queue_limit),
        size(node.memory),
        _percent(node.copies.present, node.copies.wanted),
    ]


def _ranks(nodes: Sequence[NodeRow | SilentNode]) -> Iterator[Text]:
    """The ranks of the oldest save by stage."""
    saves = [save for node in nodes if isinstance(node, NodeRow) for save in node.saves]
    oldest = min((save.id for save in saves), default=None)
    at = {stage: sorted(r for save in saves if save.id == oldest for r in save.ranks[stage]) for stage in STAGES}
    parts = [f"{stage} {_ranges(ranks)}" for stage, ranks in at.items() if ranks]
    if parts:
        yield Text()
        yield Text(f"ranks of save {oldest}: {'; '.join(parts)}")


def _stage(node: NodeRow) -> str:
    """The earliest stage in the node's oldest save."""
    if not node.saves:
        return "-"
    save = node.saves[0]
    return "stored" if save.stored else next((stage for stage in STAGES if save.ranks[stage]), "coded")


def _behind(node: NodeRow | SilentNode) -> tuple[int, str]:
    """The sort key of a node: silent ones first, then those at the earliest stage."""
    stages = (*STAGES, "stored", "-")
    return (stages.index(_stage(node)) if isinstance(node, NodeRow) else -1), node.node


def _percent(part: int, whole: int) -> str:
    return f"{100 * part // whole} %" if whole else "-"


def _ranges(numbers: Iterable[int]) -> str:
    """``0-3, 7``: consecutive numbers as a range."""
    ranges = []
    for _, group in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        run = [number for _, number in group]
        ranges.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(ranges)
