"""What differs between two versions, as their manifests tell it: the facts behind ``raystow diff``. No pack is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ...storage.format.boxes import Box

if TYPE_CHECKING:
    from ...storage.format.manifest import Chunk
    from ...storage.version import TensorInfo, Version


class What(str, Enum):
    """What became of a tensor. ``LAYOUT``: it lies in other chunks than before, so only its bytes can tell."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"
    LAYOUT = "layout"
    SAME = "same"


@dataclass(frozen=True)
class Difference:
    """A tensor of either version. ``how``: its old and new form, if that is another. ``nbytes``: raw bytes in the later version,
    of a removed tensor in the earlier one. ``changed``: bytes that differ, or as long as none was read those of the chunks that
    do; None if the manifests cannot tell. ``boxes``: the changed chunks; None if the chunks are others than before.

    After a comparison of the bytes: ``elements`` that differ; of those that are floats ``largest``, the greatest absolute
    difference (None if there is none), and ``undefined``, the number of those without one: infinities and NaN.
    """

    name: str
    what: What
    dtype: str
    nbytes: int
    chunks: int
    how: str = ""
    changed: int | None = 0
    boxes: tuple[Box, ...] | None = ()
    elements: int | None = None
    largest: float | None = None
    undefined: int = 0

    @property
    def comparable(self) -> bool:
        """Whether reading the bytes tells more: both versions have it, in one shape and dtype, and it is not known to be same."""
        return not self.how and (self.what is What.LAYOUT or (self.what is What.CHANGED and bool(self.boxes)))

    @property
    def weight(self) -> int:
        """Bytes that may differ: what counts most comes first."""
        return self.nbytes if self.changed is None else self.changed


def differences(before: Version, after: Version) -> list[Difference]:
    """Every tensor of either version. Reads both records and manifests."""
    old, new = before.tensors(), after.tensors()
    found = []
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            found.append(_lone(name, What.REMOVED, old[name], len(before.chunks[name])))
        elif name not in old:
            found.append(_lone(name, What.ADDED, new[name], len(after.chunks[name])))
        else:
            found.append(_both(name, old[name], new[name], before.chunks[name], after.chunks[name]))
    return found


def ordered(found: Sequence[Difference]) -> list[Difference]:
    """Those that are not the same, the most bytes first."""
    return sorted((one for one in found if one.what is not What.SAME), key=lambda one: (-one.weight, one.name))


def changed_values(before: Version, after: Version) -> dict[What, list[str]]:
    """The names of plain values that were added, removed or changed."""
    old, new = _values(before), _values(after)
    if before.world_size != after.world_size:  # other ranks, so it counts only which values there are
        old, new = ({name: {text: set[int]() for text in texts} for name, texts in of.items()} for of in (old, new))
    return {
        What.ADDED: sorted(new.keys() - old.keys()),
        What.REMOVED: sorted(old.keys() - new.keys()),
        What.CHANGED: sorted(name for name in old.keys() & new.keys() if old[name] != new[name]),
    }


def _values(version: Version) -> dict[str, dict[str, set[int]]]:
    """Name -> each text that it has -> the ranks that saved it."""
    found: dict[str, dict[str, set[int]]] = {}
    for fragment in version.fragments:
        for row in fragment.values:
            found.setdefault(row.name, {}).setdefault(row.text, set()).update(row.ranks)
    return found


def _lone(name: str, what: What, info: TensorInfo, chunks: int) -> Difference:
    return Difference(name, what, info.dtype, info.nbytes, chunks, changed=info.nbytes)


def _both(name: str, old: TensorInfo, new: TensorInfo, before: Sequence[Chunk], after: Sequence[Chunk]) -> Difference:
    if how := _forms(old, new):
        return Difference(name, What.CHANGED, new.dtype, new.nbytes, len(after), how, new.nbytes)
    digests = {chunk.box: chunk.raw_digest for chunk in before}
    if digests.keys() != {chunk.box for chunk in after}:
        return Difference(name, What.LAYOUT, new.dtype, new.nbytes, len(after), changed=None, boxes=None)
    changed = [chunk for chunk in after if chunk.raw_digest != digests[chunk.box]]
    what = What.CHANGED if changed else What.SAME
    boxes, nbytes = tuple(chunk.box for chunk in changed), sum(chunk.nbytes for chunk in changed)
    return Difference(name, what, new.dtype, new.nbytes, len(after), changed=nbytes, boxes=boxes)


def _forms(old: TensorInfo, new: TensorInfo) -> str:
    """``float32 -> bfloat16``, ``3 x 4 -> 3 x 8``; empty if the bytes are laid out alike."""
    pairs = ((old.dtype, new.dtype), (_shape(old), _shape(new)))
    return ", ".join(f"{a} -> {b}" for a, b in pairs if a != b)


def _shape(info: TensorInfo) -> str:
    return " x ".join(str(n) for n in info.shape) or "scalar"
