"""``raystow show``: what one version holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...storage.chains import line
from ...storage.retention.freeing import estimate
from .present import age, count, emit, moment, out, printable, ratio_text, size, table
from .summary import summary
from .target import LATEST, Json, Target, Uri, Which, open_target

if TYPE_CHECKING:
    from ...storage.version import Version


def show(uri: Uri, version: Which = LATEST, json: Json = False) -> None:
    """Show what a version holds: its metrics, tensors, sizes and codecs.

    Reads the version's record and manifest, none of its packs. RATIO is stored bytes by raw bytes.

    Example:  raystow show s3://bucket/runs/llama 7
    """
    target = open_target(uri)
    chosen = target.version(version)
    facts = {"uri": target.repository.uri, **summary(chosen), "pins": target.pins(chosen.id)}
    if json:
        emit(facts)
        return
    out.print(f"version {chosen.id} of {target.repository.uri}", style="bold", soft_wrap=True)
    for name, text in _lines(target, chosen, facts):
        out.print(f"{name:<8} {printable(text)}", soft_wrap=True)
    for title, key, noun in (("groups", "groups", "tensors"), ("dtypes", "dtypes", "tensors"), ("codecs", "codecs", "planes")):
        rows = [
            [name, f"{s[noun]:,}", size(s["raw"]), size(s["stored"]), ratio_text(s["stored"], s["raw"])]
            for name, s in facts[key].items()
        ]
        out.print()
        out.print(table(title, ["", f">{noun.upper()}", ">RAW", ">STORED", ">RATIO"], rows))
    if facts["rounded"]:
        out.print()
        out.print(table("rounded", ["", ">TENSORS", ">RAW", ">STORED", ">RATIO", ">ERROR", ">SQNR"], _rounded(facts["rounded"])))
    out.print()
    out.print(table("largest tensors", ["NAME", "DTYPE", "SHAPE", ">RAW", ">RATIO"], map(_largest, facts["largest"])))


def _lines(target: Target, version: Version, facts: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [
        ("step", str(version.step)),
        ("created", f"{moment(version.created)} ({age(target.age(version.created))} ago)"),
        ("saved by", f"{count(facts['world_size'], 'rank')} on {count(facts['nodes'], 'node')}"),
        ("bytes", f"{size(version.raw)} raw, {size(version.bytes)} stored (ratio {ratio_text(version.bytes, version.raw)})"),
        ("holds", f"{count(facts['tensors'], 'tensor')}, {count(facts['values'], 'plain value')}"),
        ("objects", f"{count(facts['packs'], 'pack')} of {count(facts['chunks'], 'chunk')}"),
        ("needs", _needs(target, version)),
        ("thinned", _thinned(version)),
        *(("coded with", f"{codec}: {why}") for codec, why in sorted(version.record.coding.items())),
        *(("lossy", text) for text in _lossy(facts)),
        ("metrics", ", ".join(f"{name} {_brief(value)}" for name, value in version.metrics.items())),
        ("pins", ", ".join(facts["pins"])),
        ("writer", ", ".join(f"{name} {number}" for name, number in facts["writer"].items())),
    ]
    return [(name, text) for name, text in lines if text]


def _needs(target: Target, version: Version) -> str:
    """What it is a difference to, and what it would take by itself, where the root has that."""
    told = ", ".join(f"version {id}" for id in version.entry.bases)
    _, *bases = line({entry.id: entry for entry in target.root.versions}, version.entry)
    if bases[1:]:
        told += f", and {count(len(bases) - 1, 'version')} that it needs"
    return f"{told} (by itself it would take about {size(estimate(version.entry, bases[-1]))})" if bases else told


def _thinned(version: Version) -> str:
    thinned = version.record.thinned
    if thinned is None:
        return ""
    rounded = "" if thinned.mantissa_bits is None else f", with {thinned.mantissa_bits} bits of mantissa"
    return f"{moment(thinned.at)}: holds {' and '.join(thinned.groups)} only{rounded}"


def _lossy(facts: dict[str, Any]) -> list[str]:
    """What was asked for when it was saved, rule by rule, and what all rounding has come to."""
    groups: dict[str, list[str]] = {}
    for name, rule in facts["lossy"].items():
        groups.setdefault(rule, []).append(name)
    rules = [f"{rule}: {', '.join(names)}" for rule, names in groups.items()]
    spared = sum(one["spared"] for one in facts["rounded"].values())
    return [*rules, f"about {size(spared)} less to store than with every bit"] if facts["rounded"] or rules else []


def _rounded(tensors: dict[str, Any]) -> list[list[str]]:
    """A row for each rule: the largest error of all its tensors by the number itself, and the lowest ratio of signal to noise."""
    rows = list[list[str]]()
    for rule in sorted({one["rule"] for one in tensors.values()}):
        some = [one for one in tensors.values() if one["rule"] == rule]
        raw, stored = (sum(one[key] for one in some) for key in ("raw", "stored"))
        error, sqnr = max(one["max_relative"] for one in some), min((one["sqnr"] for one in some if one["sqnr"]), default=None)
        told = [f"{error:.2g}", "-" if sqnr is None else f"{sqnr:.1f} dB"]
        rows.append([rule, f"{len(some):,}", size(raw), size(stored), ratio_text(stored, raw), *told])
    return rows


def _largest(row: dict[str, Any]) -> list[str]:
    shape = " x ".join(str(n) for n in row["shape"]) or "scalar"
    return [row["name"], row["dtype"], shape, size(row["nbytes"]), ratio_text(row["stored"], row["nbytes"])]


def _brief(value: object) -> str:
    """A metric in at most 60 characters; a long integer in hexadecimal, as Python refuses to write thousands of decimals."""
    return (hex(value) if isinstance(value, int) and value.bit_length() > 200 else repr(value))[:60]
