"""The plots of a report: SVG by matplotlib, embedded in an HTML page that defines their colours.

Plots are drawn in placeholder colours (ink, grid, series), which become CSS variables of the page, so that one picture suits
light, dark and print. Text stays text, and the SVG refers to no other file.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from html import escape

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_INK, _MUTED, _LINE = "#000001", "#000002", "#000003"
_SERIES = ("#000011", "#000012", "#000013", "#000014")
_VARIABLES = {_INK: "ink", _MUTED: "muted", _LINE: "line"} | {color: f"series-{i}" for i, color in enumerate(_SERIES, 1)}
_MARKERS = ("o", "s", "^", "D")  # in addition to colours, for colour-blind readers
_SIZE = (4.8, 2.9)  # inches; small, so that text stays readable on a phone
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
_MARKED = 60  # points; above this, markers would hide the line


def lines(name: str, alt: str, steps: Sequence[int], series: Mapping[str, Sequence[float]], *, unit: str, top: float = 0) -> str:
    """Draw series over steps, from zero to at least ``top``.

    Args:
        name: The id of the plot within the page.
        alt: The plot described in words.
        steps: The values of the x axis.
        series: The values of each series by its label.
        unit: The unit of the values.
        top: The smallest upper limit of the y axis.

    Returns:
        The SVG element.
    """
    with _drawing(name):
        figure, axes = _over_steps(unit)
        for (label, ys), color, marker in zip(series.items(), _SERIES, _MARKERS, strict=False):
            axes.plot(steps, ys, color=color, marker=marker if len(steps) <= _MARKED else None, label=label)
        axes.set_ylim(0, max([top, *(y for ys in series.values() for y in ys)]) * 1.08 or 1)
        if len(series) > 1:
            _legend(axes)
        return _svg(figure, name, alt)


def dots(name: str, alt: str, steps: Sequence[int], ys: Sequence[float], *, unit: str) -> str:
    """Draw one value per step, each on a stem since neighbours are independent."""
    with _drawing(name):
        figure, axes = _over_steps(unit)
        axes.vlines(steps, 0, ys, color=_SERIES[0], linewidth=1)
        axes.plot(steps, ys, _MARKERS[0], color=_SERIES[0])
        axes.set_ylim(0, max(ys, default=0) * 1.08 or 1)
        return _svg(figure, name, alt)


def stacks(name: str, alt: str, labels: Sequence[str], parts: Mapping[str, Sequence[float]], *, unit: str) -> str:
    """Draw a horizontal bar per label, the first at the top, stacked of parts."""
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


def _drawing(name: str) -> AbstractContextManager[None]:
    # Salted by name: ids differ between the plots of a page, and are the same each time.
    return matplotlib.rc_context({**_STYLE, "svg.hashsalt": name})


def _axes(label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(label)
    return figure, axes


def _over_steps(unit: str) -> tuple[Figure, Axes]:
    figure, axes = _axes("step")
    axes.set_ylabel(unit)
    axes.grid(visible=False, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure, axes


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, columnspacing=1.2, handlelength=1.4)


def _svg(figure: Figure, name: str, alt: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawn = buffer.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"\s*<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'<g id="[^"]*"', "<g", drawn)  # "axes_1" would occur in each plot of the page
    drawn = re.sub(r' (width|height)="[\d.]+pt"', "", drawn, count=2)
    for color, variable in _VARIABLES.items():
        drawn = drawn.replace(color, f"var(--{variable})")
    return drawn.replace("<svg ", f'<svg id="plot-{name}" role="img" aria-label="{escape(alt)}" ', 1)
