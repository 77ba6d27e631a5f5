"""The plots of a report, for plotly.js: data and layout as JSON, without colours.

The page draws them, in the colours of its theme: a trace has the number of its colour in ``meta``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MARKERS = ("circle", "square", "triangle-up", "diamond")  # in addition to colours, for colour-blind readers
_LINEAR, _LOGARITHMIC = {"nticks": 7}, {"type": "log", "dtick": 1}  # axes
_MARKED = 60  # points; above this, markers would hide the line
_FLATTENED = 10  # medians; a larger maximum hides the other values: the axis becomes logarithmic


@dataclass(frozen=True)
class Plot:
    """A plot. ``name``: its id within the page. ``alt``: the plot described in words."""

    name: str
    alt: str
    figure: Mapping[str, object]

    @property
    def data(self) -> str:
        """The figure as JSON that cannot end a script element."""
        return json.dumps(self.figure, allow_nan=False).replace("<", "\\u003c")


def lines(name: str, alt: str, steps: Sequence[int], series: Mapping[str, Sequence[float]], *, unit: str, top: float = 0) -> Plot:
    """Draw series over steps, from zero to at least ``top``; from the smallest value if one is negative."""
    mode = "lines+markers" if len(steps) <= _MARKED else "lines"
    traces = [_scatter(mode, label, steps, ys, number) for number, (label, ys) in enumerate(series.items(), 1)]
    values = [y for ys in series.values() for y in ys]
    limits: dict[str, object] = {"rangemode": "tozero" if min(values, default=0.0) >= 0 else "normal"}
    if top:
        limits = {"range": [0, max([top, *values]) * 1.08]}
    return Plot(name, alt, {"data": traces, "layout": _layout("step", unit, limits, legend=len(series) > 1)})


def dots(name: str, alt: str, steps: Sequence[int], ys: Sequence[float], *, unit: str) -> Plot:
    """Draw one value per step. The axis is logarithmic if one value would flatten the others."""
    limits = _LOGARITHMIC if flattened(ys) else {"rangemode": "tozero"}
    return Plot(name, alt, {"data": [_scatter("markers", unit, steps, ys, 1)], "layout": _layout("step", unit, limits)})


def flattened(ys: Sequence[float]) -> bool:
    """Whether one value is so much larger than the median that it would hide the others."""
    return bool(ys) and min(ys) > 0 and max(ys) > _FLATTENED * sorted(ys)[len(ys) // 2]


def curve(
    name: str, alt: str, points: Sequence[tuple[float, float]], marks: Mapping[str, tuple[float, float]], *, unit: str
) -> Plot:
    """Draw a curve over seconds with marked points, on logarithmic axes."""
    xs, ys = zip(*points, strict=True)
    traces = [_scatter("lines", unit, xs, ys, 1) | {"showlegend": False}]
    traces += [_scatter("markers", label, [x], [y], number, size=11) for number, (label, (x, y)) in enumerate(marks.items(), 2)]
    layout = _layout("seconds from save to save", unit, _LOGARITHMIC, x_limits=_LOGARITHMIC, legend=True)
    return Plot(name, alt, {"data": traces, "layout": layout})


def stacks(name: str, alt: str, labels: Sequence[str], parts: Mapping[str, Sequence[float]], *, unit: str) -> Plot:
    """Draw a horizontal bar per label, the first at the top, stacked of parts."""
    traces = [
        {"type": "bar", "orientation": "h", "name": part, "y": list(labels), "x": list(widths), "meta": number}
        for number, (part, widths) in enumerate(parts.items(), 1)
    ]
    layout = _layout(unit, "", {"autorange": "reversed", "type": "category", "automargin": True}, legend=True)
    return Plot(name, alt, {"data": traces, "layout": {**layout, "barmode": "stack"}})


def _scatter(mode: str, label: str, xs: Sequence[float], ys: Sequence[float], number: int, **marker: object) -> dict[str, object]:
    """A trace. ``number``: of its colour and symbol."""
    symbol = _MARKERS[(number - 1) % len(_MARKERS)]
    points = {"x": list(xs), "y": list(ys)}
    return {"type": "scatter", "mode": mode, "name": label, **points, "meta": number, "marker": {"symbol": symbol, **marker}}


def _layout(
    x: str, y: str, limits: Mapping[str, object], *, x_limits: Mapping[str, object] = _LINEAR, legend: bool = False
) -> dict[str, object]:
    return {
        "xaxis": {"title": {"text": x}, **x_limits},
        "yaxis": {"title": {"text": y}, **limits},
        "showlegend": legend,
        "hovermode": "closest",
    }
