"""The plots of a report: SVG by matplotlib, to stand in an HTML page and take their colours from it.

Each is drawn in colours that mean something (ink, grid, first series), and these become the page's CSS variables, so that one
picture serves on light, on dark and on paper. Text stays text. Nothing in it refers to anything outside.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_INK, _MUTED, _LINE = "#000001", "#000002", "#000003"
_SERIES = ("#000011", "#000012", "#000013", "#000014")
_VARIABLES = {_INK: "ink", _MUTED: "muted", _LINE: "line"} | {color: f"series-{i}" for i, color in enumerate(_SERIES, 1)}
_MARKERS = ("o", "s", "^", "D")  # beside colours, for those who do not tell these apart
_SIZE = (4.8, 2.9)  # inches: small, so that text is still to be read where the picture is as narrow as a telephone
_STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "svg.fonttype": "none",
    "text.color": _INK,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.formatter.useoffset": False,
    "grid.color": _LINE,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "path.simplify_threshold": 0.5,
}
_MARKED = 60  # points of a line beyond which markers would hide it


def lines(name: str, alt: str, steps: Sequence[int], series: Mapping[str, Sequence[float]], *, unit: str, top: float = 0) -> str:
    """Series over steps, from zero up, at least to ``top``. ``name`` is the picture's own in its page, ``alt`` says in words what
    it shows, ``unit`` what the values are in."""
    with _drawing(name):
        figure, axes = _over_steps(unit)
        for (label, ys), color, marker in zip(series.items(), _SERIES, _MARKERS, strict=False):
            axes.plot(steps, ys, color=color, marker=marker if len(steps) <= _MARKED else None, label=label)
        axes.set_ylim(0, max([top, *(y for ys in series.values() for y in ys)]) * 1.08 or 1)
        if len(series) > 1:
            _legend(axes)
        return _svg(figure, name, alt)


def dots(name: str, alt: str, steps: Sequence[int], ys: Sequence[float], *, unit: str) -> str:
    """One value for each of some steps, each on a stem: none of them follows from its neighbours."""
    with _drawing(name):
        figure, axes = _over_steps(unit)
        axes.vlines(steps, 0, ys, color=_SERIES[0], linewidth=1)
        axes.plot(steps, ys, _MARKERS[0], color=_SERIES[0])
        axes.set_ylim(0, max(ys, default=0) * 1.08 or 1)
        return _svg(figure, name, alt)


def stacks(name: str, alt: str, labels: Sequence[str], parts: Mapping[str, Sequence[float]], *, unit: str) -> str:
    """A bar for each label, the first at the top, made up of parts."""
    with _drawing(name):
        figure, axes = _axes(unit)
        left = [0.0] * len(labels)
        for (part, widths), color in zip(parts.items(), _SERIES, strict=False):
            axes.barh(labels, widths, left=left, color=color, edgecolor="none", height=0.6, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.grid(visible=False, axis="y")
        axes.invert_yaxis()
        _legend(axes)
        return _svg(figure, name, alt)


def _drawing(name: str) -> Any:
    # Salted by name: ids within the pictures of one page differ, and are the same whenever the page is made.
    return matplotlib.rc_context({**_STYLE, "svg.hashsalt": name})


def _axes(label: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(label)
    return figure, axes


def _over_steps(unit: str) -> tuple[Figure, Any]:
    figure, axes = _axes("step")
    axes.set_ylabel(unit)
    axes.grid(visible=False, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure, axes


def _legend(axes: Any) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, columnspacing=1.2, handlelength=1.4)


def _svg(figure: Figure, name: str, alt: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawn = buffer.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"\s*<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'<g id="[^"]*"', "<g", drawn)  # "axes_1" in every picture of the page
    drawn = re.sub(r' (width|height)="[\d.]+pt"', "", drawn, count=2)
    for color, variable in _VARIABLES.items():
        drawn = drawn.replace(color, f"var(--{variable})")
    return drawn.replace("<svg ", f'<svg id="plot-{name}" role="img" aria-label="{escape(alt)}" ', 1)
