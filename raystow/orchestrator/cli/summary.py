"""What a version consists of, counted from its record and manifest: the facts behind ``raystow show``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ...storage.format import values
from .present import ratio

if TYPE_CHECKING:
    from ...storage.version import TensorInfo, Version


@dataclass(frozen=True)
class Share:
    """Some of a version's bytes: of how many things, raw and stored."""

    count: int
    raw: int
    stored: int


def shares(items: Iterable[tuple[str, int, int]]) -> dict[str, Share]:
    """Sum up (key, raw bytes, stored bytes) by key, the most stored bytes first."""
    sums: dict[str, Share] = {}
    for key, raw, stored in items:
        before = sums.get(key, Share(0, 0, 0))
        sums[key] = Share(before.count + 1, before.raw + raw, before.stored + stored)
    return dict(sorted(sums.items(), key=lambda item: (-item[1].stored, item[0])))


def summary(version: Version, *, largest: int = 10) -> dict[str, Any]:
    """The JSON fields of ``raystow show``. Reads the version record and the manifest, no pack."""
    record, tensors = version.record, version.tensors()
    top = sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0]))[:largest]
    return {
        "id": version.id,
        "step": version.step,
        "created": version.created,
        "attempt": version.attempt,
        "world_size": record.world_size,
        "nodes": len(record.fragments),
        "packs": len(record.packs),
        "chunks": sum(len(rows) for rows in version.chunks.values()),
        "tensors": len(tensors),
        "values": len(version.values()),
        "raw": version.raw,
        "stored": version.bytes,
        "ratio": ratio(version.bytes, version.raw),
        "thinned": record.thinned and {**vars(record.thinned), "groups": list(record.thinned.groups)},
        "coding": record.coding,
        "bases": list(record.bases),
        "metrics": {name: values.encode(value) for name, value in record.metrics.items()},
        "writer": record.writer,
        "groups": _fields("tensors", shares((t.group, t.nbytes, t.stored) for t in tensors.values())),
        "dtypes": _fields("tensors", shares((t.dtype, t.nbytes, t.stored) for t in tensors.values())),
        "codecs": _fields("planes", shares(_planes(version))),
        "lossy": record.lossy,
        "rounded": _rounded(version, tensors),
        "largest": [{"name": name, **asdict(info), "ratio": ratio(info.stored, info.nbytes)} for name, info in top],
    }


def _rounded(version: Version, tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, Any]]:
    """Name -> what rounding has done to it, where not every bit was kept."""
    return {
        name: {
            "rule": found.rule,
            "raw": tensors[name].nbytes,
            "stored": tensors[name].stored,
            "spared": found.spared,
            "max_error": found.error,
            "max_relative": found.relative,
            "sqnr": found.sqnr,
        }
        for name, found in version.rounded().items()
        if name in tensors
    }


def _planes(version: Version) -> Iterator[tuple[str, int, int]]:
    """Codec, raw and stored bytes of every plane; a chunk that was not split is one plane, and so is one that is derived."""
    for rows in version.chunks.values():
        for chunk in rows:
            if chunk.derivation is not None:
                yield "derived", chunk.nbytes, 0
                continue
            for codec, stored in zip(chunk.coding.codecs, chunk.coding.stored, strict=True):
                yield codec, chunk.nbytes // len(chunk.coding.codecs), stored


def _fields(noun: str, found: Mapping[str, Share]) -> dict[str, dict[str, Any]]:
    return {
        key: {noun: share.count, "raw": share.raw, "stored": share.stored, "ratio": ratio(share.stored, share.raw)}
        for key, share in found.items()
    }
