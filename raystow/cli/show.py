"""``raystow show``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from ..storage.errors import Damaged, NotFound
from ..storage.format import values
from ..storage.retention import rewrite
from ..storage.root.delta_chain import base_chain
from ..storage.versions.contents import Share, shares
from ..storage.versions.version import TensorInfo, Version
from ..storage.versions.version_selector import LATEST
from . import provenance
from .options import Json, Uri, Which
from .output import age, count, dimensions, emit, moment, out, printable, ratio, ratio_text, size, table
from .target import Target, open_target, segment_fields, segments_text

_LARGEST = 10  # tensors listed


def show(uri: Uri, version: Which = LATEST, json: Json = False) -> None:
    """Show one version: metrics, tensors, sizes and codecs.

    Reads the version's record and manifest; of a delta also some chunks, to estimate its size as a whole version. For rounded
    tensors, ERROR is the largest relative error of a number and SQNR the lowest signal-to-noise ratio of a tensor.

    Example:  raystow show s3://bucket/runs/llama 7
    """
    target = open_target(uri)
    chosen = target.version(version)
    tensors = chosen.tensors()
    parts = {
        "groups": ("tensors", shares((t.group, t.nbytes, t.stored) for t in tensors.values())),
        "dtypes": ("tensors", shares((t.dtype, t.nbytes, t.stored) for t in tensors.values())),
        "codecs": ("planes", chosen.contents.planes),
    }
    largest = sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0]))[:_LARGEST]
    if json:
        emit(_facts(target, chosen, tensors, parts, largest))
        return
    out.print(f"version {chosen.id} of {target.uri}", style="bold")
    for name, text in _lines(target, chosen, len(tensors)):
        if text:
            out.print(f"{name:<8} {printable(text)}")
    for title, (noun, some) in parts.items():
        out.print()
        rows = ([name, *_cells(share)] for name, share in some.items())
        out.print(table(title, ["", f">{noun.upper()}", ">RAW", ">STORED", ">RATIO"], rows))
    if rounded := _rounded_rows(chosen, tensors):
        out.print()
        out.print(table("rounded", ["", ">TENSORS", ">RAW", ">STORED", ">RATIO", ">ERROR", ">SQNR"], rounded))
    out.print()
    rows = ([name, t.dtype, dimensions(t.shape), size(t.nbytes), ratio_text(t.stored, t.nbytes)] for name, t in largest)
    out.print(table("largest tensors", ["NAME", "DTYPE", "SHAPE", ">RAW", ">RATIO"], rows))


def _cells(share: Share) -> list[str]:
    return [f"{share.count:,}", size(share.raw), size(share.stored), ratio_text(share.stored, share.raw)]


def _fields(share: Share, noun: str) -> dict[str, object]:
    return {noun: share.count, "raw": share.raw, "stored": share.stored, "ratio": ratio(share.stored, share.raw)}


def _facts(
    target: Target,
    version: Version,
    tensors: Mapping[str, TensorInfo],
    parts: Mapping[str, tuple[str, Mapping[str, Share]]],
    largest: list[tuple[str, TensorInfo]],
) -> dict[str, object]:
    record = version.record
    return {
        "uri": target.uri,
        "id": version.id,
        "step": version.step,
        "created": version.created,
        "attempt": version.attempt,
        "world_size": record.world_size,
        "nodes": len(record.fragments),
        "packs": record.pack_count,
        "chunks": version.contents.chunks,
        "tensors": len(tensors),
        "values": version.contents.values,
        "raw": version.raw,
        "stored": version.bytes,
        "ratio": ratio(version.bytes, version.raw),
        "thinned": record.thinned,
        "rolled_back": target.rolled_back(version.id),
        "coding": record.coding,
        "bases": record.bases,
        "metrics": {name: values.encode(value) for name, value in record.metrics.items()},
        "writer": record.writer,
        "provenance": record.provenance,
        "notes": {name: values.encode(value) for name, value in record.notes.items()},
        **{title: {name: _fields(share, noun) for name, share in some.items()} for title, (noun, some) in parts.items()},
        "lossy": record.lossy,
        "rounded": {
            name: {
                "rule": one.rule,
                "raw": tensors[name].nbytes,
                "stored": tensors[name].stored,
                "spared": one.spared,
                "max_error": one.error,
                "max_relative": one.relative,
                "sqnr": one.sqnr,
            }
            for name, one in version.rounded().items()
            if name in tensors
        },
        "largest": [{"name": name, **asdict(info), "ratio": ratio(info.stored, info.nbytes)} for name, info in largest],
        "differences": [asdict(one) for one in record.differences],
        "parts": record.parts,
        "pins": target.pins(version.id),
        "segments": [segment_fields(one) for one in target.segments(version.id)],
    }


def _lines(target: Target, version: Version, tensors: int) -> Iterator[tuple[str, str]]:
    record, chunks = version.record, version.contents.chunks
    yield "step", str(version.step)
    yield "created", f"{moment(version.created)} ({age(target.age(version.created))} ago)"
    yield "saved by", f"{count(record.world_size, 'rank')} on {count(len(record.fragments), 'node')}"
    ratio = ratio_text(version.bytes, version.raw)
    yield "bytes", f"{size(version.raw)} raw, {size(version.bytes)} stored (ratio {ratio})"
    yield "content", f"{count(tensors, 'tensor')}, {count(version.contents.values, 'plain value')}"
    yield "parts", ", ".join(f"{name} ({size(nbytes)})" for name, nbytes in record.parts.items())
    yield "objects", f"{count(record.pack_count, 'pack')} of {count(chunks, 'chunk')}"
    yield "needs", _needs(target, version)
    if (thinned := record.thinned) is not None:
        rounded = "" if thinned.mantissa_bits is None else f", with {thinned.mantissa_bits} bits of mantissa"
        yield "thinned", f"{moment(thinned.at)}: {' and '.join(thinned.groups)} only{rounded}"
    yield "journal", segments_text(target.segments(version.id))
    if (at := target.rolled_back(version.id)) is not None:
        yield "state", f"rolled back, {moment(at)}"
    for codec, why in sorted(record.coding.items()):
        yield "coded with", f"{codec}: {why}"
    yield from (("lossy", text) for text in _lossy(version))
    yield "metrics", ", ".join(f"{name} {_brief(value)}" for name, value in version.metrics.items())
    yield from (("ranks", str(one)) for one in record.differences)
    yield "pins", ", ".join(target.pins(version.id))
    yield "exported", ", ".join(place for place, id in target.root.exports.items() if id == version.id)
    yield "writer", ", ".join(f"{name} {number}" for name, number in record.writer.items())
    yield from provenance.lines(version)


def _needs(target: Target, version: Version) -> str:
    """The bases of its deltas, and the estimated size without them."""
    bases = ", ".join(f"version {id}" for id in version.entry.bases)
    _, *chain = base_chain({entry.id: entry for entry in target.root.listed}, version.entry)
    if chain[1:]:
        bases += f", and {count(len(chain) - 1, 'version')} that it needs"
    if not chain:
        return bases
    try:
        whole = size(rewrite.plan(version, None).sampled())
    except (Damaged, NotFound) as error:
        return f"{bases} (a part of it cannot be read: {error.what})"
    return f"{bases} (stored whole it would take about {whole})"


def _lossy(version: Version) -> list[str]:
    """The rules that were requested when it was saved, and the bytes that rounding saved."""
    rules: dict[str, list[str]] = {}
    for name, rule in version.record.lossy.items():
        rules.setdefault(rule, []).append(name)
    spared = sum(one.spared for one in version.rounded().values())
    lines = [f"{rule}: {', '.join(names)}" for rule, names in rules.items()]
    return [*lines, f"saves about {size(spared)} compared to lossless"] if rules or version.rounded() else []


def _rounded_rows(version: Version, tensors: Mapping[str, TensorInfo]) -> list[list[str]]:
    """A row for each rule: the largest relative error and the lowest signal-to-noise ratio of its tensors."""
    rows = list[list[str]]()
    rounded = {name: one for name, one in version.rounded().items() if name in tensors}
    for rule in sorted({one.rule for one in rounded.values()}):
        some = {name: one for name, one in rounded.items() if one.rule == rule}
        share = Share(len(some), sum(tensors[name].nbytes for name in some), sum(tensors[name].stored for name in some))
        error = max(one.relative for one in some.values())
        sqnr = [one.sqnr for one in some.values() if one.sqnr]
        rows.append([rule, *_cells(share), f"{error:.2g}", f"{min(sqnr):.1f} dB" if sqnr else "-"])
    return rows


def _brief(value: object) -> str:
    """A metric in at most 60 characters; a long integer in hexadecimal, since Python refuses thousands of decimals."""
    return (hex(value) if isinstance(value, int) and value.bit_length() > 200 else repr(value))[:60]
