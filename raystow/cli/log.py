"""``raystow log``."""

from __future__ import annotations

from typing import Annotated

import typer

from ..storage.format import values
from .lineage import LineageVersion, graph, lineage
from .options import Json, Uri, number
from .output import age, emit, out, printable
from .target import Target, open_target


def log(
    uri: Uri,
    metric: Annotated[str, typer.Option(metavar="NAME", help="Print this metric.")] = "loss",
    newest: Annotated[int, number(help="Print the newest N versions.")] = 100,
    json: Json = False,
) -> None:
    """Draw the lineage of a repository, newest version first.

    Each version is below those that continue it: columns join where several runs resumed from one version. Lines tell where runs
    began and which versions were rolled back. Reads one small object per version.

    Example:  raystow log s3://bucket/runs/llama
    """
    target = open_target(uri)
    versions = lineage(target)[-newest:]
    if json:
        emit({"uri": target.uri, "versions": [_fields(target, one) for one in reversed(versions)]})
        return
    if not versions:
        out.print(f"no version yet in {target.uri}")
    for columns, one in graph(versions):
        out.print(columns if one is None else f"{columns}  {_text(target, one, metric)}")


def _text(target: Target, one: LineageVersion, metric: str) -> str:
    version, parts = one.version, list[str]()
    if one.record is not None and isinstance(value := one.record.metrics.get(metric), int | float):
        parts.append(f"{printable(metric)} {value:.4g}")
    parts.append(f"{age(target.age(version.created))} ago")
    if target.rolled_back(version.id) is not None:
        parts.append("rolled back")
    if pins := target.pins(version.id):
        parts.append(f"pinned: {printable(', '.join(pins))}")
    if one.begins:
        parts.append("fresh start" if one.parent is None else f"resumed from version {one.parent}")
    if one.record is None:
        parts.append("its record cannot be read")
    return f"version {version.id}, step {version.step}: {', '.join(parts)}"


def _fields(target: Target, one: LineageVersion) -> dict[str, object]:
    metrics = one.record.metrics if one.record is not None else {}
    return {
        "id": one.version.id,
        "step": one.version.step,
        "created": one.version.created,
        "parent": one.parent,
        "run": one.origin.get("run"),
        "begins": one.begins,
        "rolled_back": target.rolled_back(one.version.id),
        "pins": target.pins(one.version.id),
        "metrics": {name: values.encode(value) for name, value in metrics.items()},
    }
