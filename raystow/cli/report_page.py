"""Renders a run's history as one HTML page with plots and tables. All text from the repository is escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from .._version import __version__
from ..orchestrator.save_interval import LEAST, best_interval, lost_share
from ..storage.runtime.clock import SYSTEM
from . import report_plots as plots
from .advise import observed_mtbf
from .output import age, count, dollars, duration, moment, price, printable, size
from .report_plots import Plot
from .run_history import RunHistory, SavedVersion

_METRICS = 6  # which are drawn
_BARS = 12  # the latest restores, which are drawn
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_SOURCES = {
    "memory": "own node's memory",
    "peer": "other nodes",
    "store": "store",
    "instead": "store, as fallback",
}


@dataclass(frozen=True)
class Section:
    """A plot with its title. ``note``: what it shows and omits; without ``plot``, why there is none: this stands below the
    others."""

    title: str
    note: str
    plot: Plot | None = None


def render(facts: RunHistory) -> str:
    """Return the whole page."""
    environment = Environment(
        loader=PackageLoader("raystow.cli", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters.update(size=size, moment=moment, printable=printable, duration=duration, dollars=dollars)
    template = environment.get_template("report_page.html.j2")
    made = (_bytes, _ratio, _stall, _interval, _restores, _cost)
    sections = [*(make(facts) for make in made), *_metrics(facts)] if facts.versions else []
    return template.render(
        facts=facts,
        tiles=_tiles(facts),
        sections=[section for section in sections if section.plot is not None],
        omitted=[section for section in sections if section.plot is None],
        sources=_SOURCES,
        software=f"raystow {__version__}",
        plotly=get_plotlyjs(),
        nonce=SYSTEM.token() + SYSTEM.token(),  # text of the repository cannot know it
    )


def _tiles(facts: RunHistory) -> Iterable[tuple[str, str]]:
    """The figures at the top of the page."""
    yield "versions", f"{facts.live:,}"
    yield "stored", size(facts.live_stored)
    if facts.versions:
        newest = facts.versions[-1]
        yield "newest", f"step {newest.step:,} ({age(facts.made - newest.created)} old)"
        yield "ratio of the newest", _fraction(newest.ratio)
    if facts.median_stall is not None:
        yield "stall of a save", f"{duration(facts.median_stall)} median, {duration(max(facts.stalls))} at most"
    yield "restores", f"{len(facts.restores):,}"
    if facts.differences:
        yield "saves with differences between ranks", f"{len({saved.id for saved, _ in facts.differences}):,}"


def _bytes(facts: RunHistory) -> Section:
    raw, stored = [saved.raw for saved in facts.versions], [saved.stored for saved in facts.versions]
    alt = f"{_span(facts.versions)}: raw {_range(raw, size)}, stored {_range(stored, size)}."
    unit, series = _in_one_unit({"raw": raw, "stored": stored})
    plot = plots.lines("bytes", alt, _steps(facts.versions), series, unit=unit)
    return Section("Size", "Bytes of each version in memory (raw) and in the store (stored).", plot)


def _ratio(facts: RunHistory) -> Section:
    sized = [saved for saved in facts.versions if saved.ratio is not None]
    ratios = [saved.ratio or 0.0 for saved in sized]
    note = "Stored bytes divided by raw bytes: smaller is better."
    if not sized:
        return Section("Ratio", "No version has any bytes.")
    alt = f"{_span(sized)}: ratio {_range(ratios, _fraction)}."
    return Section("Ratio", note, plots.lines("ratio", alt, _steps(sized), {"ratio": ratios}, unit="", top=1))


def _stall(facts: RunHistory) -> Section:
    known = [saved for saved in facts.versions if saved.stall is not None]
    note = (
        "The time that the training loop waited in save and fence, on the rank that waited longest. A slowdown of the loop by "
        "copies and coding in the background is not included."
    )
    if missing := len(facts.versions) - len(known):
        note += f" Unknown for {missing:,} of {count(len(facts.versions), 'version')}."
    if facts.median_stall is None:
        return Section("Stall of each save", "No save has recorded it.")
    if plots.flattened(facts.stalls):
        note += " The axis is logarithmic: the first save of a process takes longer."
    alt = f"{_span(known)}: stall {_range(facts.stalls, duration)}, median {duration(facts.median_stall)}."
    plot = plots.dots("stall", alt, _steps(known), [1000 * stall for stall in facts.stalls], unit="milliseconds")
    return Section("Stall of each save", note, plot)


def _interval(facts: RunHistory) -> Section:
    title = "Time lost, by interval"
    if not facts.median_stall:
        return Section(title, "No save has recorded a stall.")
    stall, failures = facts.median_stall, observed_mtbf(facts)
    best, present = best_interval(stall, failures.seconds, least=LEAST), facts.interval
    marks = {"best": best, **({"at present": present} if present else {})}
    low, high = min(marks.values()) / 10, max(marks.values()) * 10
    points = [low * (high / low) ** (number / 100) for number in range(101)]
    lost = {x: 100 * lost_share(x, stall, failures.seconds) for x in (*points, *marks.values())}
    note = (
        f"Saves and the work that failures undo, at a stall of {duration(stall)} and a failure every "
        f"{duration(failures.seconds)} ({failures.source}). Least at {duration(best)}: {lost[best]:.2g} %. See raystow advise."
    )
    alt = f"Time lost by interval: {', '.join(f'{name} {duration(x)}, {lost[x]:.2g} %' for name, x in marks.items())}."
    drawn = {name: (x, lost[x]) for name, x in marks.items()}
    return Section(title, note, plots.curve("interval", alt, [(x, lost[x]) for x in points], drawn, unit="% of the time"))


def _metrics(facts: RunHistory) -> list[Section]:
    """A plot of each metric that several versions have, up to a number."""
    found = list[Section]()
    for name in sorted({name for saved in facts.versions for name in saved.metrics}):
        having = [saved for saved in facts.versions if name in saved.metrics]
        if len(having) > 1 and len(found) < _METRICS:
            values = [saved.metrics[name] for saved in having]
            alt = f"{_span(having)}: {printable(name)} {_range(values, '{:.4g}'.format)}."
            plot = plots.lines(f"metric-{len(found)}", alt, _steps(having), {printable(name): values}, unit=printable(name))
            found.append(Section(printable(name), "A metric of the versions, as given to save.", plot))
    return found


def _restores(facts: RunHistory) -> Section:
    note = (
        "The sources that ranks read from, in stored bytes of all ranks. A version records the restores since the version before "
        "it: restores without a later save, and those of dropped versions, are missing."
    )
    drawn = facts.restores[-_BARS:]
    if not any(restore.read for restore in drawn):
        return Section("Restores", "No version records what a restore read.")
    if len(drawn) < len(facts.restores):
        note += f" The latest {_BARS} of {len(facts.restores):,} are drawn."
    labels = [f"{number}: step {restore.step}" for number, restore in enumerate(facts.restores, 1)][-_BARS:]
    parts = {name: [restore.read.get(source, 0) for restore in drawn] for source, name in _SOURCES.items()}
    parts = {name: values for name, values in parts.items() if any(values)}
    total = {name: sum(values) for name, values in parts.items()}
    alt = f"{count(len(drawn), 'restore')}: " + ", ".join(f"{size(nbytes)} from {name}" for name, nbytes in total.items()) + "."
    unit, series = _in_one_unit(parts)
    return Section("Restores", note, plots.stacks("restores", alt, labels, series, unit=unit))


def _cost(facts: RunHistory) -> Section:
    if facts.tariff is None:
        given = "--store-price (of a GB for a month) and --gpu-price (of a GPU for an hour)"
        return Section("Cost", f"No prices were given: {given}.")
    prices, gpus = facts.tariff.prices, facts.tariff.gpus
    gpus_text = "for each rank" if gpus is None else f"for each of {count(gpus, 'GPU')}"
    note = (
        f"The cumulative cost of these versions: {price(prices.gb_month)} per GB (10^9 bytes) and month, and "
        f"{price(prices.gpu_hour)} an hour {gpus_text} during stalls. Requests, transfer and dropped versions are not included."
    )
    costs = [saved.dollars for saved in facts.versions if saved.dollars is not None]
    sums = {
        "store": list(accumulate(cost.store for cost in costs)),
        "store, uncompressed": list(accumulate(cost.raw_store for cost in costs)),
        "waiting GPUs": list(accumulate(cost.stall for cost in costs)),
    }
    alt = f"{_span(facts.versions)}: " + ", ".join(f"{name} {dollars(of[-1])}" for name, of in sums.items()) + " in total."
    return Section("Cost", note, plots.lines("cost", alt, _steps(facts.versions), sums, unit="dollars"))


def _in_one_unit(series: Mapping[str, Sequence[int]]) -> tuple[str, dict[str, list[float]]]:
    """Convert bytes to the unit that suits the largest value."""
    most = max((nbytes for values in series.values() for nbytes in values), default=0)
    power = max(power for power in range(len(_UNITS)) if power == 0 or most >= 1000 * 1024 ** (power - 1))
    return _UNITS[power], {name: [nbytes / 1024**power for nbytes in values] for name, values in series.items()}


def _steps(versions: Sequence[SavedVersion]) -> list[int]:
    return [saved.step for saved in versions]


def _span(versions: Sequence[SavedVersion]) -> str:
    return f"{count(len(versions), 'version')}, steps {versions[0].step:,} to {versions[-1].step:,}"


def _range(values: Sequence[float], show: Callable[[float], str]) -> str:
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"


def _fraction(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"
