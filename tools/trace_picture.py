"""Draws the spans of ``examples/traced_training.py``, for docs/traces.md:

    python tools/trace_picture.py FOLDER/traces docs/images/trace.svg

Spans of raystow and their parents are drawn; spans with one name, parent and process share a row.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path

_COLOURS = "#6b7280", "#2563eb", "#0891b2", "#d97706", "#7c3aed"
_ROLES = {"raystow.save": "coordinator", "raystow.save.node": "node worker", "raystow.save.rank": "rank"}
_ROW, _LABELS, _BARS, _TOP = 20, 330, 640, 34


@dataclass(frozen=True)
class DrawnSpan:
    """A span of a process. ``start``, ``end``: seconds since 1970. ``parent``: "" for a root."""

    id: str
    parent: str
    name: str
    process: str
    start: float
    end: float
    rank: int | None

    @property
    def role(self) -> str:
        """What its process is, if that follows from the span."""
        return _ROLES.get(self.name, "") + (f" {self.rank}" if self.name == "raystow.save.rank" else "")


def read(folder: Path) -> list[DrawnSpan]:
    """Read the spans of all processes, one JSON object in a line."""
    found = []
    for file in sorted(folder.glob("*.jsonl")):
        for one in map(json.loads, file.read_text().splitlines()):
            id, parent = one["context"]["span_id"], one["parent_id"] or ""
            start, end = (
                datetime.fromisoformat(one[moment].replace("Z", "+00:00")).timestamp() for moment in ("start_time", "end_time")
            )
            found.append(DrawnSpan(id, parent, one["name"], file.stem, start, end, one["attributes"].get("raystow.rank")))
    return found


def rows(spans: list[DrawnSpan]) -> Iterator[tuple[int, list[DrawnSpan]]]:
    """Each row's depth and spans, children after their parents."""
    by_id, children = {span.id: span for span in spans}, defaultdict[str, list[DrawnSpan]](list)
    kept = dict[str, DrawnSpan]()
    for span in spans:
        above: DrawnSpan | None = span if span.name.startswith("raystow.") else None
        while above is not None:
            kept[above.id], above = above, by_id.get(above.parent)
    for span in sorted(kept.values(), key=lambda one: one.start):
        children[span.parent if span.parent in kept else ""].append(span)

    def below(parent: str, depth: int) -> Iterator[tuple[int, list[DrawnSpan]]]:
        alike = defaultdict[tuple[str, str], list[DrawnSpan]](list)
        for child in children[parent]:
            alike[child.name, child.process if not children[child.id] else child.id].append(child)
        for group in alike.values():
            yield depth, group
            for child in group:
                yield from below(child.id, depth + 1)

    yield from below("", 0)


def draw(spans: list[DrawnSpan]) -> str:
    """Return the picture as SVG."""
    drawn = [*rows(spans)]
    ours = [span for _, group in drawn for span in group if span.name.startswith("raystow.")]
    begin, end = min(span.start for span in ours), max(span.end for span in ours)
    roles = {span.process: span.role for span in spans if span.role}
    names = sorted({roles.get(span.process, "driver") for _, group in drawn for span in group})
    colour = dict(zip(names, _COLOURS, strict=False))
    width, height = _LABELS + _BARS + 20, _TOP + _ROW * len(drawn) + 12

    def x(moment: float) -> float:
        return _LABELS + _BARS * (min(max(moment, begin), end) - begin) / (end - begin)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, name in enumerate(names):
        at = 10 + 130 * number
        lines.append(
            f'<rect x="{at}" y="8" width="12" height="12" fill="{colour[name]}"/><text x="{at + 17}" y="18">{name}</text>'
        )
    lines.append(f'<text x="{width - 10}" y="18" text-anchor="end">{end - begin:.2f} s</text>')
    for number, (depth, group) in enumerate(drawn):
        y, first = _TOP + _ROW * number, group[0]
        label = first.name + (f" {first.rank}" if first.rank is not None and len(group) == 1 else "")
        label += f" ({len(group)})" if len(group) > 1 else ""
        lines.append(f'<text x="{10 + 14 * depth}" y="{y + 13}">{escape(label)}</text>')
        fill = colour[roles.get(first.process, "driver")]
        for span in group:
            left = x(span.start)
            lines.append(
                f'<rect x="{left:.1f}" y="{y + 3}" width="{max(1.0, x(span.end) - left):.1f}" height="12" rx="2" fill="{fill}"/>'
            )
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Draw the spans of a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("svg", type=Path)
    arguments = parser.parse_args()
    arguments.svg.write_text(draw(read(arguments.folder)))


if __name__ == "__main__":
    main()
