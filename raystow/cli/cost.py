"""``raystow cost``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from ..storage.errors import NotFound
from ..storage.versions.contents import DERIVED, Share
from ..storage.versions.version_selector import LATEST
from . import options
from .options import Json, number, seconds
from .output import billed, count, dollars, duration, emit, out, price, say, table
from .pricing import DAYS, Bill, Prices, Saving, Schedule, break_even, monthly_bill, savings
from .run_history import read_history
from .target import open_target

_RECORDS = 100  # versions whose records are read

_STALLS = (
    "give the stall of a save: --stall 0.06 --stall-compressed 0.07 (measured seconds); or, for a loop that waits until "
    "everything is written, --write-rate 5GB (per second)"
)


def cost(
    uri: Annotated[str | None, typer.Argument(metavar="URI", help="Repository that gives all but the prices.")] = None,
    gpus: Annotated[int | None, options.gpus(help="GPUs that wait during a stall; by default one per rank of URI.")] = None,
    gpu_price: Annotated[float, options.gpu_price] = "4.40",  # type: ignore[assignment]
    store_price: Annotated[float, options.store_price] = "0.023",  # type: ignore[assignment]
    every: Annotated[float | None, options.time(help="Time between saves: 90s, 30m, 6h; by default as in URI.")] = None,
    state: Annotated[int | None, options.size(help="Raw bytes of a version: 782GB.")] = None,
    ratio: Annotated[float | None, options.ratio(help="Stored bytes divided by raw bytes: 0.8, or its inverse: 1.25x.")] = None,
    keep: Annotated[int | None, number(max=10**9, help="Versions in the store; by default those in URI, or 1.")] = None,
    stall: Annotated[float | None, seconds(help="Stall of the loop per save without compression.")] = None,
    stall_compressed: Annotated[float | None, seconds(help="Stall of the loop per save with compression.")] = None,
    write_rate: Annotated[
        int | None, options.size(help="Instead of stalls: the loop waits for writes at this rate per second.")
    ] = None,
    code_rate: Annotated[int | None, options.size(help="With --write-rate: raw bytes compressed per second by all GPUs.")] = None,
    json: Json = False,
) -> None:
    """Compute what checkpoints cost per month, with and without compression.

    Multiplies stored bytes and waiting GPUs by their prices, and prints all assumptions. A URI gives sizes, the interval, the
    recorded stalls, and the savings of each technique. Stalls are assumed to be equal without compression; for a loop that waits
    for the store, give --write-rate. The default prices are those of S3 Standard and of NVIDIA's example of 2026.

    Example:  raystow cost s3://bucket/runs/llama --gpu-price 2.50
    """
    known = _read(uri) if uri is not None else RepositoryCost()
    gpus = known.ranks if gpus is None else gpus
    every = known.every if every is None else every
    if gpus is None or every is None:
        raise typer.BadParameter("give --gpus and --every, or the URI of a repository with two versions")
    raw, part = known.state if state is None else state, ratio or known.ratio
    if not raw or part is None:
        raise typer.BadParameter("give the size of a version: --state 782GB --ratio 0.8, or the URI of a repository")
    given = (stall, stall_compressed), write_rate, code_rate
    if known.stall is not None and given == ((None, None), None, None):
        stalls, how = (known.stall, known.stall), "stalls are the median of those recorded, the same without compression"
    else:
        stalls, how = _stalls(raw, part, *given)
    if max(stalls) >= every:
        what = f"a save takes {max(stalls):,.1f} s, but the next one begins after {every:,.0f} s"
        raise typer.BadParameter(f"{what}: save less often (--every)")
    schedule, prices = Schedule(gpus, every, keep or known.keep or 1), Prices(gpu_price, store_price)
    held = known.held if state is None and ratio is None and keep is None else None
    plain = monthly_bill(schedule, prices, stored=raw, stall=stalls[0])
    coded = monthly_bill(schedule, prices, stored=raw * part, stall=stalls[1], kept=held)
    even = break_even(schedule, prices, plain.store_dollars - coded.store_dollars)
    rounded = f"; {billed(known.spared)} of the saving are due to rounding, which cannot be undone" if known.spared else ""
    assumptions = [
        f"a month of {DAYS} days with a save every {every / 60:,.3g} minutes: {schedule.saves:,.0f} saves",
        f"a version has {billed(raw)}, compressed {part:.3f} of that; {count(schedule.keep, 'version')} kept{rounded}",
        how,
        f"{count(gpus, 'GPU')} at {price(gpu_price)} an hour; all wait during a stall",
        f"a GB (10^9 bytes) costs {price(store_price)} a month; requests and transfer are free",
    ]
    if json:
        without, compressed = _figures(plain), _figures(coded)
        emit(
            {
                "uri": known.uri,
                "version": known.version,
                "ratio": round(part, 4),
                "without": without,
                "with": compressed,
                "saved": {name: round(without[name] - compressed[name], 6) for name in without},
                "pays": coded.dollars < plain.dollars,
                "break_even": even,
                "assumptions": assumptions,
                "savings": known.savings,
            }
        )
        return
    _print_bills(plain, coded, even)
    for title, lines in (
        ("of which", [f"{one.technique}: {one.explanation}" for one in known.savings]),
        ("assumptions", assumptions),
    ):
        if lines:
            out.print(f"\n{title}", style="dim")
        for line in lines:
            say(f"- {line}")


@dataclass(frozen=True)
class RepositoryCost:
    """What a repository says: sizes of its versions, ``held`` bytes in total, ``spared`` bytes by rounding; seconds from save to
    save (``every``), and the median recorded ``stall``."""

    uri: str | None = None
    version: int | None = None
    state: int | None = None
    ratio: float | None = None
    keep: int | None = None
    held: int | None = None
    savings: tuple[Saving, ...] = ()
    spared: int = 0
    ranks: int | None = None
    every: float | None = None
    stall: float | None = None


def _read(uri: str) -> RepositoryCost:
    target = open_target(uri)
    newest, entries = target.version(LATEST), target.root.versions
    if not newest.raw:
        raise NotFound(f"version {newest.id} has no bytes", subject=target.uri, remedy="give --state and --ratio")
    full = [entry for entry in entries if entry.resumable] or entries
    derived = newest.contents.planes.get(DERIVED, Share()).raw
    history = read_history(target, newest=_RECORDS)
    return RepositoryCost(
        uri=target.uri,
        version=newest.id,
        state=newest.raw,
        ratio=sum(entry.stored for entry in full) / sum(entry.raw for entry in full),
        keep=len(entries),
        held=sum(entry.stored for entry in entries),
        savings=tuple(savings(entries, derived)),
        spared=sum(one.spared for one in newest.rounded().values()) if newest.record.lossy else 0,
        ranks=newest.world_size,
        every=history.interval,
        stall=history.median_stall,
    )


def _stalls(
    raw: int, ratio: float, stalls: tuple[float | None, float | None], write_rate: int | None, code_rate: int | None
) -> tuple[tuple[float, float], str]:
    """Seconds of stall without and with compression, and how they were determined."""
    stall, compressed = stalls
    if stall is not None and compressed is not None and write_rate is None and code_rate is None:
        return (stall, compressed), "stalls are as given"
    if not write_rate or code_rate == 0 or stall is not None or compressed is not None:
        raise typer.BadParameter(_STALLS)
    writing, how = raw / write_rate, f"the loop waits until everything is written, at {billed(write_rate)} per second"
    if code_rate is None:
        return (writing, writing * ratio), f"{how}; compression takes no additional time"
    rates = f"{how}, while {billed(code_rate)} per second are compressed"
    return (writing, max(writing * ratio, raw / code_rate)), rates


def _figures(bill: Bill) -> dict[str, float]:
    return {name: round(value, 6) for name, value in asdict(bill).items()}


def _print_bills(plain: Bill, coded: Bill, even: float | None) -> None:
    rows = []
    for name, (title, show) in _FIGURES.items():
        without, compressed = getattr(plain, name), getattr(coded, name)
        saved = without - compressed
        rows.append([title, show(without), show(compressed), f"-{show(-saved)}" if saved < 0 else show(saved)])
    out.print(table("", ["", ">WITHOUT", ">COMPRESSED", ">SAVED"], rows))
    out.print()
    say(_verdict(plain, coded), style="bold")
    if even is not None and even >= 0.001:
        say(f"the saving in the store pays for {duration(even)} more stall per save")


def _verdict(plain: Bill, coded: Bill) -> str:
    saved = plain.dollars - coded.dollars
    if saved > 0:
        return f"compression saves {dollars(saved)} a month, {100 * saved / plain.dollars:.1f} %"
    if saved == 0:
        return "compression does not pay: it saves nothing at these prices"
    store, longer = plain.store_dollars - coded.store_dollars, coded.gpu_dollars - plain.gpu_dollars
    return f"compression does not pay: it saves {dollars(store)} of storage and costs {dollars(longer)} of GPU time a month"


_FIGURES = {
    "stored": ("a version", billed),
    "kept": ("kept", billed),
    "written": ("written a month", billed),
    "store_dollars": ("store, a month", dollars),
    "stall": ("stall of a save", duration),
    "stalled": ("stalls a month", duration),
    "gpu_hours": ("GPU hours a month", "{:,.1f}".format),
    "gpu_dollars": ("GPUs, a month", dollars),
    "dollars": ("total, a month", dollars),
}
"""Field of ``Bill`` -> its title and format."""
