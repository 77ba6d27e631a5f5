"""What ``raystow top`` shows, 80 columns wide and as high as there is room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..coordinator import Phase
from .present import age, count, printable, ratio_text, size, table

_WAITS_FOR = {Phase.GATHERING.value: "ranks", Phase.SEALING.value: "nodes", Phase.READY.value: "the commit"}
_STAGES = ("staging", "coding", "coded")  # of a rank, the slowest first


def view(facts: dict[str, Any], *, rows: int | None = None) -> RenderableType:
    """The facts for a person; of nodes and failures no more than ``rows`` together, those first that others wait for."""
    parts: list[RenderableType] = [*_head(facts)]
    if facts["saves"]:
        parts += [Text(), _saves(facts["saves"])]
    nodes = sorted(facts["nodes"], key=_behind)
    room = len(nodes) if rows is None else max(1, rows - min(3, len(facts["failures"])))
    if nodes:
        parts += [Text(), _nodes(nodes[:room])]
        if nodes[room:]:
            parts.append(Text(f"(and {count(len(nodes) - room, 'node')} more)", style="dim"))
        parts += _ranks(nodes)
    if facts["failures"]:
        parts += [Text(), *_failures(facts["failures"] if rows is None else facts["failures"][:3])]
    return Group(*parts)


def _head(facts: dict[str, Any]) -> Iterator[Text]:
    yield Text(printable(facts["uri"] or "a run whose coordinator has not answered yet"), style="bold")
    if facts["trouble"]:
        yield Text(printable(facts["trouble"]), style="bold red")
    elif not facts["coordinator"]["answers"]:
        yield Text("the coordinator does not answer: it may be restarting; what is below is old", style="bold red")
    newest = facts["newest"]
    if newest is None:
        yield Text("newest   no version yet")
    else:
        stored = f"{size(newest['stored'])} (ratio {ratio_text(newest['stored'], newest['raw'])})"
        yield Text(f"newest   version {newest['id']}, step {newest['step']}, {age(newest['age'])} ago, {stored}")
    lost = facts["aborted_in_a_row"]
    yield Text(f"saves    {len(facts['saves'])} under way, {lost} given up since", style="bold red" if lost else "")
    answering = [node for node in facts["nodes"] if node["answers"]]
    sums = {name: sum(node[name] or 0 for node in answering) for name in ("ranks", "coded_per_second", "stored_per_second")}
    rates = f"coding {size(sums['coded_per_second'])}/s, storing {size(sums['stored_per_second'])}/s"
    yield Text(f"nodes    {len(facts['nodes'])} with {count(sums['ranks'], 'rank')}, {rates}")


def _saves(saves: list[dict[str, Any]]) -> RenderableType:
    rows = [
        [
            str(save["id"]),
            str(save["step"]),
            _WAITS_FOR[save["phase"]],
            f"{save['begun']}/{save['world_size']}",
            f"{save['finished']}/{save['world_size']}" if save["begun"] else "-",
            f"{save['stored']}/{save['nodes']}",
            age(save["age"]),
            age(save["left"]),
        ]
        for save in saves
    ]
    return table("", [">SAVE", ">STEP", "WAITS FOR", ">BEGUN", ">CODED", ">STORED", ">AGE", ">LEFT"], rows)


def _nodes(nodes: list[dict[str, Any]]) -> RenderableType:
    rows = [
        [
            node["node"][:8],
            str(node["ranks"]),
            _stage(node),
            size(node["coded_per_second"] or 0),
            size(node["stored_per_second"] or 0),
            str(node["uploads"]),
            _part(node["queue"], node["queue_limit"]),
            size(node["memory"]),
            _part(node["copies"]["present"], node["copies"]["wanted"]),
        ]
        if node["answers"]
        else [node["node"][:8], "", "no answer", "", "", "", "", "", ""]
        for node in nodes
    ]
    return table("", ["NODE", ">RANKS", "STAGE", ">CODED/s", ">STORED/s", ">UP", ">QUEUE", ">MEMORY", ">COPIES"], rows)


def _ranks(nodes: list[dict[str, Any]]) -> Iterator[Text]:
    """The ranks of the oldest save by stage."""
    saves = [save for node in nodes if node["answers"] for save in node["saves"]]
    oldest = min((save["id"] for save in saves), default=None)
    at = {stage: sorted(r for save in saves if save["id"] == oldest for r in save["ranks"][stage]) for stage in _STAGES}
    told = [f"{stage} {_spans(ranks)}" for stage, ranks in at.items() if ranks]
    if told:
        yield Text()
        yield Text(f"ranks of save {oldest}: {'; '.join(told)}")


def _failures(failures: list[dict[str, Any]]) -> Iterator[Text]:
    yield Text("given up", style="dim")
    for failure in failures:
        yield Text(printable(f"{age(failure['ago'])} ago, step {failure['step']}: {failure['reason']}"), style="red")


def _stage(node: dict[str, Any]) -> str:
    """The one of its oldest save that others wait for."""
    if not node["saves"]:
        return "-"
    save = node["saves"][0]
    return "stored" if save["stored"] else next((stage for stage in _STAGES if save["ranks"][stage]), "coded")


def _behind(node: dict[str, Any]) -> tuple[int, str]:
    """How far behind others a node is: those that do not answer, then those at the earliest stage."""
    stages = (*_STAGES, "stored", "-")
    return (stages.index(_stage(node)) if node["answers"] else -1), node["node"]


def _part(part: int, whole: int) -> str:
    return f"{100 * part // whole} %" if whole else "-"


def _spans(numbers: Iterable[int]) -> str:
    """``0-3, 7``: neighbours together."""
    spans = []
    for _, group in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        run = [number for _, number in group]
        spans.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(spans)
