"""``raystow diff``: what changed from one version to another."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .present import count, emit, out, printable, ratio, size, table
from .progress import byte_bar
from .target import LATEST, Json, Target, Uri, open_target

if TYPE_CHECKING:
    from ...storage.version import Version
    from .differences import Difference, What

DIFFERENT = 7
"""The exit code for versions that differ, where it is asked for."""

_NAMED = 5  # plain values told by name; the rest is counted
_MARKS = {"added": "+", "removed": "-", "changed": ""}

_WHICH = "A version's id, the name of a pin, or 'latest'."


def diff(
    uri: Uri,
    v1: Annotated[str, typer.Argument(metavar="V1", help=_WHICH, show_default=False)],
    v2: Annotated[str, typer.Argument(metavar="V2", help=_WHICH)] = LATEST,
    deep: Annotated[bool, typer.Option("--deep", help="Read what may have changed, and compare it byte by byte.")] = False,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="List the N tensors with the most changed bytes.")] = 20,
    all: Annotated[bool, typer.Option("--all", help="List all that differ.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help=f"End with {DIFFERENT} unless nothing differs.")] = False,
    json: Json = False,
) -> None:
    """Tell which tensors changed from V1 to V2, and how much of them.

    Compares the chunks' digests in the manifests and reads no pack: CHANGED are the bytes of the chunks that differ. Where a
    tensor lies in other chunks than before, as after a change of the world size, only its bytes can tell. --deep reads those and
    the changed chunks, counts the bytes that differ, and tells the greatest difference of floats.

    Example:  raystow diff s3://bucket/runs/llama best latest
    """
    from .differences import What, changed_values, differences, ordered

    target = open_target(uri)
    before, after = target.version(v1), target.version(v2)
    found = differences(before, after)
    if deep:
        found = _compared(target, before, after, found, quiet=json)
    listed, values = ordered(found), changed_values(before, after)
    differ = bool(listed) or any(values.values())
    if json:
        emit(
            {
                "uri": target.repository.uri,
                "before": {"version": before.id, "step": before.step},
                "after": {"version": after.id, "step": after.step},
                "deep": deep,
                "different": differ,
                "summary": {what.value: sum(one.what is what for one in found) for what in What},
                "tensors": [_fields(one) for one in listed],
                "values": {what.value: names for what, names in values.items()},
            }
        )
    else:
        _tell(target, before, after, found, listed if all else listed[:top], deep=deep)
        _tell_values(values)
    if exit_code and differ:
        raise typer.Exit(DIFFERENT)


def _compared(target: Target, before: Version, after: Version, found: list[Difference], *, quiet: bool) -> list[Difference]:
    from .comparison import compare, work

    with contextlib.ExitStack() as stack:
        for version in (before, after):
            stack.enter_context(target.repository.lease(version))
        advance = stack.enter_context(byte_bar("comparing", work(found), quiet=quiet))
        return compare(before, after, found, advance)


def _tell(
    target: Target, before: Version, after: Version, found: list[Difference], listed: list[Difference], *, deep: bool
) -> None:
    from .differences import What

    between = f"version {before.id} (step {before.step}) -> version {after.id} (step {after.step})"
    out.print(between, style="bold")
    out.print(target.repository.uri, style="dim", soft_wrap=True)
    counts = {what: sum(one.what is what for one in found) for what in What}
    different = len(found) - counts[What.SAME]
    if listed:
        headers = ["NAME", "WHAT", *([] if deep else [">CHUNKS"]), ">CHANGED", ">SHARE", *([">MAX DIFF"] if deep else [])]
        out.print(table("", headers, [_cells(one, deep) for one in listed]))
    if len(listed) < different:
        out.print(f"(and {different - len(listed):,} more: --all lists them)", style="dim")
    out.print(_sentence(counts))
    if counts[What.LAYOUT]:
        out.print("layout differs: they lie in other chunks than before; --deep compares the bytes")


def _tell_values(values: dict[What, list[str]]) -> None:
    names = [_MARKS[what.value] + name for what, of in values.items() for name in of]
    if names:
        more = f", and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
        shown = printable(", ".join(names[:_NAMED]))
        out.print(f"{count(len(names), 'plain value')} changed: {shown}{more}")


def _sentence(counts: dict[What, int]) -> str:
    words = {"layout": "in another layout", "same": "the same"}
    parts = [f"{number:,} {words.get(what.value, what.value)}" for what, number in counts.items() if number]
    return f"{count(sum(counts.values()), 'tensor')}: {', '.join(parts) or 'none in either version'}"


def _cells(one: Difference, deep: bool) -> list[str]:
    what = one.how or ("layout differs" if one.changed is None else one.what.value)
    known = one.changed is not None
    chunks = f"{len(one.boxes)}/{one.chunks}" if one.boxes else "-"
    share = f"{_percent(one)} %" if known and one.nbytes else "-"
    return [
        one.name,
        what,
        *([] if deep else [chunks]),
        size(one.changed) if one.changed is not None else f"<= {size(one.nbytes)}",
        share,
        *([_distance(one)] if deep else []),
    ]


def _percent(one: Difference) -> str:
    """Three digits; what is not nothing is never told as 0, nor what is not all as 100."""
    part = 100 * (one.changed or 0) / one.nbytes
    if 0 < part < 0.01:
        return "< 0.01"
    return f"{min(part, 99.9) if part < 100 else part:.{2 if part < 9.995 else 1 if part < 100 else 0}f}"


def _distance(one: Difference) -> str:
    largest = "-" if one.largest is None else f"{one.largest:.3g}"
    return f"{largest} ({one.undefined:,} inf/nan)" if one.undefined else largest


def _fields(one: Difference) -> dict[str, Any]:
    return {
        "name": one.name,
        "what": one.what.value,
        "how": one.how,
        "dtype": one.dtype,
        "bytes": one.nbytes,
        "chunks": one.chunks,
        "changed_chunks": len(one.boxes) if one.boxes else None,
        "changed_bytes": one.changed,
        "share": None if one.changed is None else ratio(one.changed, one.nbytes),
        "changed_elements": one.elements,
        "max_difference": one.largest,
        "undefined_differences": one.undefined,
    }
