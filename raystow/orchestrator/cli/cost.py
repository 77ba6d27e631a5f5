"""``raystow cost``: what checkpoints cost in a month, with and without compression."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from ...storage.errors import NotFound
from .bill import DAYS, Bill, Habit, Prices, break_even
from .present import billed, count, emit, out, price, table
from .quantities import duration, nbytes, stored_ratio
from .savings import Saving, savings
from .target import Json, open_target

_STALLS = (
    "say for how long the training loop waits in a save: --stall 0.06 --stall-compressed 0.07 (seconds, as measured); or, for a "
    "loop that waits until all is written, --write-rate 5GB (a second)"
)


def cost(
    gpus: Annotated[int, typer.Option(min=0, metavar="N", help="GPUs that wait while the loop does.", show_default=False)],
    gpu_price: Annotated[float, typer.Option(min=0, metavar="$", help="Of one GPU for an hour.", show_default=False)],
    store_price: Annotated[
        float, typer.Option(min=0, metavar="$", help="Of a GB (10^9 bytes) in the store for a month.", show_default=False)
    ],
    every: Annotated[
        float, typer.Option(parser=duration, metavar="TIME", help="From one save to the next: 30m.", show_default=False)
    ],
    uri: Annotated[
        str | None,
        typer.Argument(
            metavar="URI", help="A repository: state, ratio and what is kept come from its versions.", show_default=False
        ),
    ] = None,
    state: Annotated[
        int | None, typer.Option(parser=nbytes, metavar="SIZE", help="Bytes of a version before compression: 782GB.")
    ] = None,
    ratio: Annotated[
        float | None, typer.Option(parser=stored_ratio, metavar="RATIO", help="Stored bytes by raw bytes: 0.8, or 1.25x.")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Versions in the store; by default as many as in URI, or 1.")
    ] = None,
    stall: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="What a save without compression costs the loop.")
    ] = None,
    stall_compressed: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="What a save with compression costs the loop.")
    ] = None,
    write_rate: Annotated[
        int | None, typer.Option(parser=nbytes, metavar="SIZE", help="Instead: bytes written in a second, while the loop waits.")
    ] = None,
    code_rate: Annotated[
        int | None, typer.Option(parser=nbytes, metavar="SIZE", help="With it: raw bytes compressed in a second, by all GPUs.")
    ] = None,
    json: Json = False,
) -> None:
    """Tell what checkpoints cost in a month, with and without compression.

    Stored bytes at the store's price, and GPUs that wait at theirs: all prices are yours, and all that is assumed is printed.
    It says when compression does not pay.

    Example:  raystow cost s3://bucket/runs/llama --every 30m --gpus 8 --gpu-price 4.40 --store-price 0.023 --write-rate 5GB
    """
    if not all(map(math.isfinite, (gpu_price, store_price, stall or 0, stall_compressed or 0))):
        raise typer.BadParameter("prices and stalls are finite numbers")
    said = _read(uri) if uri is not None else {}
    raw, part = said.get("state") if state is None else state, ratio or said.get("ratio")
    if not raw or part is None:
        raise typer.BadParameter("say how large a version is: --state 782GB --ratio 0.8, or the URI of a repository")
    stalls, how = _stalls(raw, part, stall, stall_compressed, write_rate, code_rate)
    if max(stalls) >= every:
        what = f"a save takes {max(stalls):,.1f} s, and the next one begins after {every:,.0f} s"
        raise typer.BadParameter(f"{what}: save less often (--every)")
    habit, prices = Habit(gpus, every, keep or said.get("keep") or 1), Prices(gpu_price, store_price)
    held = said.get("held") if state is None and ratio is None and keep is None else None
    plain, coded = Bill(habit, prices, raw, stalls[0]), Bill(habit, prices, raw * part, stalls[1], held)
    assumed = _assumptions(plain, part, how, said.get("spared"))
    found: list[Saving] = said.get("savings", [])
    if json:
        facts = {"uri": said.get("uri"), "version": said.get("version"), "ratio": round(part, 4)}
        emit({**facts, **_facts(plain, coded, assumed), "savings": [vars(saving) for saving in found]})
        return
    _tell(plain, coded)
    if found:
        out.print()
        out.print("in it", style="dim")
    for saving in found:
        out.print(f"- {saving.technique}: {saving.told}")
    out.print()
    out.print("assumed", style="dim")
    for line in assumed:
        out.print(f"- {line}")


def _read(uri: str) -> dict[str, Any]:
    """What the root tells of the versions, and the manifest of the newest one."""
    target = open_target(uri)
    newest, entries = target.version("latest"), target.root.versions
    if not newest.raw:
        raise NotFound(f"version {newest.id} holds no bytes", subject=target.repository.uri, remedy="say --state and --ratio")
    spared = sum(one.spared for one in newest.rounded().values()) if newest.record.lossy else None
    full = [entry for entry in entries if entry.resumable] or entries
    ratio = sum(entry.stored for entry in full) / sum(entry.raw for entry in full)
    derived = sum(row.nbytes for rows in newest.chunks.values() for row in rows if row.derivation is not None)
    return {
        "uri": target.repository.uri,
        "version": newest.id,
        "state": newest.raw,
        "ratio": ratio,
        "keep": len(entries),
        "held": sum(entry.stored for entry in entries),
        "savings": savings(entries, derived),
        "spared": spared,
    }


def _stalls(
    raw: int, ratio: float, stall: float | None, compressed: float | None, write_rate: int | None, code_rate: int | None
) -> tuple[tuple[float, float], str]:
    """Seconds without and with compression, and how they came about."""
    if stall is not None and compressed is not None and write_rate is None and code_rate is None:
        return (stall, compressed), "stalls are as given"
    if not write_rate or code_rate == 0 or stall is not None or compressed is not None:
        raise typer.BadParameter(_STALLS)
    writing, how = raw / write_rate, f"the loop waits until all is written, at {billed(write_rate)} a second"
    if code_rate is None:
        return (writing, writing * ratio), f"{how}; compressing takes no time beyond that"
    return (writing, max(writing * ratio, raw / code_rate)), f"{how}, and compressed meanwhile, at {billed(code_rate)} a second"


def _assumptions(plain: Bill, ratio: float, how: str, spared: int | None) -> list[str]:
    habit, prices = plain.habit, plain.prices
    rounded = f"; {billed(spared)} of what that saves is due to rounding, which is not undone" if spared else ""
    return [
        f"a month of {DAYS} days, with a save every {habit.every / 60:,g} minutes: {habit.saves:,.0f} saves",
        f"a version has {billed(plain.stored)}, and {ratio:.3f} of that compressed; {count(habit.keep, 'version')} kept{rounded}",
        how,
        f"{count(habit.gpus, 'GPU')} at {price(prices.gpu_hour)} an hour; all wait while the loop does",
        f"a GB (10^9 bytes) costs {price(prices.gb_month)} a month; requests and transfer cost nothing",
    ]


def _tell(plain: Bill, coded: Bill) -> None:
    rows = [
        ["a version", *_three(plain.stored, coded.stored, billed)],
        ["kept", *_three(plain.kept, coded.kept, billed)],
        ["written a month", *_three(plain.written, coded.written, billed)],
        ["store, a month", *_three(plain.store_dollars, coded.store_dollars, _dollars)],
        ["stall of a save", *_three(plain.stall, coded.stall, _seconds)],
        ["stalls a month", *_three(plain.stalled, coded.stalled, _seconds)],
        ["GPU hours a month", *_three(plain.gpu_hours, coded.gpu_hours, "{:,.1f}".format)],
        ["GPUs, a month", *_three(plain.gpu_dollars, coded.gpu_dollars, _dollars)],
        ["in all, a month", *_three(plain.dollars, coded.dollars, _dollars)],
    ]
    out.print(table("", ["", ">WITHOUT", ">COMPRESSED", ">SAVED"], rows))
    out.print()
    out.print(_verdict(plain, coded), style="bold")
    even = break_even(plain, coded)
    if even is not None and even >= 0.001:
        out.print(f"the store alone pays for {_seconds(even)} more stall in each save")


def _verdict(plain: Bill, coded: Bill) -> str:
    saved = plain.dollars - coded.dollars
    if saved > 0:
        return f"compression saves {_dollars(saved)} a month, {100 * saved / plain.dollars:.1f} %"
    if saved == 0:
        return "compression does not pay: it saves nothing at these prices"
    store, longer = plain.store_dollars - coded.store_dollars, coded.gpu_dollars - plain.gpu_dollars
    return f"compression does not pay: it saves {_dollars(store)} of storage and costs {_dollars(longer)} of GPU time a month"


def _three(plain: float, coded: float, show: Any) -> list[str]:
    saved = plain - coded
    return [show(plain), show(coded), f"-{show(-saved)}" if saved < 0 else show(saved)]


def _dollars(amount: float) -> str:
    return f"${amount:,.0f}" if amount >= 1000 else f"${amount:,.2f}"


def _seconds(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds >= 36000 else f"{seconds:,.0f} s" if seconds >= 999.5 else f"{seconds:,.3g} s"


def _facts(plain: Bill, coded: Bill, assumed: list[str]) -> dict[str, Any]:
    without, compressed = _fields(plain), _fields(coded)
    return {
        "without": without,
        "with": compressed,
        "saved": {name: round(without[name] - compressed[name], 6) for name in without},
        "pays": coded.dollars < plain.dollars,
        "break_even": break_even(plain, coded),
        "assumptions": assumed,
    }


def _fields(bill: Bill) -> dict[str, float]:
    fields = {
        "stored": bill.stored,
        "kept": bill.kept,
        "written": bill.written,
        "store_dollars": bill.store_dollars,
        "stall": bill.stall,
        "stalled": bill.stalled,
        "gpu_hours": bill.gpu_hours,
        "gpu_dollars": bill.gpu_dollars,
        "dollars": bill.dollars,
    }
    return {name: round(value, 6) for name, value in fields.items()}
