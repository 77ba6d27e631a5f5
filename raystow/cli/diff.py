"""``raystow diff``."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Annotated

import typer

from ..storage.format.replica_difference import CAUSES
from ..storage.versions.version import Version
from ..storage.versions.version_selector import LATEST
from . import provenance
from .exit_codes import DIFFERENT
from .options import Json, Uri, Which, number
from .output import count, emit, out, printable, ratio, size, table
from .progress import progress_bar
from .target import Target, open_target
from .version_comparison import Change, Difference, changed_values, compare, differences, ordered, work

_NAMED = 5  # plain values that are named; the others are counted
_SIGNS = {"added": "+", "removed": "-", "changed": ""}


def diff(
    uri: Uri,
    version1: Which = "",
    version2: Which = LATEST,
    ranks: Annotated[
        bool,
        typer.Option("--ranks", help="Show what ranks held differently in one version: diff --ranks URI@VERSION."),
    ] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Read and compare the bytes that may have changed.")] = False,
    top: Annotated[int, number(help="List the N tensors with the most changed bytes.")] = 20,
    all: Annotated[bool, typer.Option("--all", help="List all tensors that differ.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help=f"Exit with {DIFFERENT} if anything differs.")] = False,
    json: Json = False,
) -> None:
    """Compare the tensors of two versions.

    Compares the digests of chunks and reads no pack: CHANGED are the bytes of the chunks that differ. `layout differs`: the
    tensor is split or stored in another way, for example after a change of the world size. --deep reads these tensors and the
    changed chunks, counts the elements with different bits, and prints the greatest absolute difference of floats.

    Example:  raystow diff s3://bucket/runs/llama best latest
    """
    if ranks:
        _diff_ranks(uri, version1, exit_code=exit_code, json=json)
        return
    if not version1:
        raise typer.BadParameter("give a version to compare, or --ranks", param_hint="VERSION1")
    target = open_target(uri)
    before, after = target.version(version1), target.version(version2)
    found = differences(before, after)
    if deep:
        found = _compared(target, before, after, found, quiet=json)
    listed, values = ordered(found), changed_values(before, after)
    counts = {what: sum(one.what is what for one in found) for what in Change}
    differ = bool(listed) or any(values.values())
    if json:
        emit(
            {
                "uri": target.uri,
                "before": {"version": before.id, "step": before.step},
                "after": {"version": after.id, "step": after.step},
                "deep": deep,
                "different": differ,
                "summary": {what.value: number for what, number in counts.items()},
                "tensors": [_fields(one) for one in listed],
                "values": {what.value: names for what, names in values.items()},
                "provenance": provenance.changes(before, after),
            }
        )
    else:
        out.print(f"version {before.id} (step {before.step}) -> version {after.id} (step {after.step})", style="bold")
        out.print(target.uri, style="dim")
        _print_tensors(listed, len(listed) if all else top, deep=deep)
        _print_summary(counts, values)
        for name, texts in provenance.changes(before, after).items():
            out.print(f"{name}: {' -> '.join(printable(text or 'none') for text in texts)}")
    if exit_code and differ:
        raise typer.Exit(DIFFERENT)


def _diff_ranks(uri: str, which: str, *, exit_code: bool, json: bool) -> None:
    """Show what ranks held differently. ``uri`` may end in ``@`` and a version."""
    if not which and "@" in uri.rpartition("/")[2]:
        uri, _, which = uri.rpartition("@")
    target = open_target(uri)
    version = target.version(which or LATEST)
    found = version.record.differences
    if json:
        facts = {"uri": target.uri, "version": version.id, "step": version.step, "different": bool(found)}
        emit({**facts, "differences": [asdict(one) for one in found]})
    else:
        out.print(f"version {version.id} (step {version.step}) of {target.uri}", style="bold")
        for one in found:
            out.print(printable(str(one)))
        out.print(printable(CAUSES) if found else "no rank held other bits, as far as ranks were compared")
    if exit_code and found:
        raise typer.Exit(DIFFERENT)


def _compared(target: Target, before: Version, after: Version, found: list[Difference], *, quiet: bool) -> list[Difference]:
    with contextlib.ExitStack() as stack:
        for version in (before, after):
            stack.enter_context(target.repository.lease(version))
        advance = stack.enter_context(progress_bar("comparing", work(found), quiet=quiet))
        return compare(before, after, found, advance)


def _print_tensors(listed: list[Difference], limit: int, *, deep: bool) -> None:
    if listed:
        headers = ["NAME", "WHAT", *([] if deep else [">CHUNKS"]), ">CHANGED", ">SHARE", *([">MAX DIFF"] if deep else [])]
        out.print(table("", headers, [_cells(one, deep) for one in listed[:limit]]))
    if len(listed) > limit:
        out.print(f"(and {len(listed) - limit:,} more: --all lists them)", style="dim")


def _print_summary(counts: dict[Change, int], values: dict[Change, list[str]]) -> None:
    words = {"layout": "in another layout", "same": "the same"}
    parts = [f"{number:,} {words.get(what.value, what.value)}" for what, number in counts.items() if number]
    out.print(f"{count(sum(counts.values()), 'tensor')}: {', '.join(parts) or 'none in either version'}")
    if any(number for what, number in counts.items() if what.value == "layout"):
        out.print("layout differs: other chunks or other stored bytes; --deep compares the tensors")
    names = [_SIGNS[what.value] + name for what, of in values.items() for name in of]
    if names:
        more = f", and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
        out.print(f"{count(len(names), 'plain value')} changed: {printable(', '.join(names[:_NAMED]))}{more}")


def _cells(one: Difference, deep: bool) -> list[str]:
    what = one.how or ("layout differs" if one.changed is None else one.what.value)
    chunks = f"{one.suspect}/{one.chunks}" if one.suspect else "-"
    changed = size(one.changed) if one.changed is not None else f"<= {size(one.nbytes)}"
    share = f"{_percent(one.changed, one.nbytes)} %" if one.changed is not None and one.nbytes else "-"
    return [one.name, what, *([] if deep else [chunks]), changed, share, *([_distance(one)] if deep else [])]


def _percent(changed: int, nbytes: int) -> str:
    """Three digits; a part is never printed as 0 or 100."""
    part = 100 * changed / nbytes
    if 0 < part < 0.01:
        return "< 0.01"
    return f"{min(part, 99.9) if part < 100 else part:.{2 if part < 9.995 else 1 if part < 100 else 0}f}"


def _distance(one: Difference) -> str:
    if one.deviation is None:
        return "-"
    largest = "-" if one.deviation.largest is None else f"{one.deviation.largest:.3g}"
    return f"{largest} ({one.deviation.undefined:,} inf/nan)" if one.deviation.undefined else largest


def _fields(one: Difference) -> dict[str, object]:
    deviation = one.deviation
    return {
        "name": one.name,
        "what": one.what.value,
        "how": one.how,
        "dtype": one.dtype,
        "bytes": one.nbytes,
        "chunks": one.chunks,
        "changed_chunks": one.suspect or None,
        "changed_bytes": one.changed,
        "share": None if one.changed is None else ratio(one.changed, one.nbytes),
        "changed_elements": deviation.elements if deviation else None,
        "max_difference": deviation.largest if deviation else None,
        "undefined_differences": deviation.undefined if deviation else 0,
    }
