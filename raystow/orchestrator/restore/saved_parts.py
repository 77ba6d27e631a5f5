"""What a version has in the place of a marker in ``into``, and memory for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ...state.as_saved import AsSaved
from ...state.object_marker import ObjectMarker
from ...state.tree import Elements, Leaf
from ...storage.coding import dtypes
from ...storage.errors import StateError, Unsupported
from ...storage.format import values
from ...storage.format.manifest import SCALAR, TENSOR, Chunk, Value, parse_path
from ...storage.format.rank_parts import rank_of
from ...storage.versions.tensor_index import FoundRows, Seeker
from ...storage.versions.value_tree import Path, beneath, part_text, rows_of_one_rank
from ...storage.versions.version import Version

if TYPE_CHECKING:
    import torch


Part: TypeAlias = "Value | list[Chunk]"
"""A value, or the chunks of a tensor."""


@dataclass
class SavedParts:
    """What a marker takes. ``parts``: by path from the marker; by rank and path if it ``merges`` ranks. ``lost``: names that
    ranks have saved each for itself and that are not restored, with the ranks whose they are, for a warning by rank 0.
    ``absent``: whether this rank is new, and ranks have saved different things."""

    parts: dict[Path, Part] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    lost: dict[str, list[int]] = field(default_factory=dict)
    merges: bool = False
    absent: bool = False


def is_per_rank(marker: object) -> bool:
    """Whether a marker stands for what each rank has for itself."""
    return isinstance(marker, ObjectMarker) and marker.per_rank


def seeks_every_rank(marker: object, seeker: Seeker) -> bool:
    """Whether a marker for what each rank has for itself must know what all ranks have saved."""
    merges = isinstance(marker, ObjectMarker) and marker.merges
    return seeker.world_size != seeker.saved and (merges or seeker.rank == 0 or seeker.rank >= seeker.saved)


def saved_parts(leaf: Leaf, found: FoundRows, around: Mapping[str, Sequence[Value]], seeker: Seeker) -> SavedParts:
    """What a version has under the name of a marker. ``around``: values by the names of their containers. Of a tensor that each
    rank has for itself, this rank's comes without the last part of its path, which names the rank."""
    marker, name = leaf.value, leaf.name
    assert isinstance(marker, AsSaved)
    taken, tensors = SavedParts(), list(_tensors(name, found))
    taken.used.update(chunks[0].name for path, chunks in tensors if _rank(path) is not None)
    if is_per_rank(marker) and seeks_every_rank(marker, seeker):
        return _of_all_ranks(leaf, found, tensors, seeker, taken)
    rows = around.get(name, ())
    rows = [row for row in rows if seeker.rank in row.ranks] if is_per_rank(marker) else rows_of_one_rank(rows, seeker.rank)
    taken.parts.update((_beneath(name, row.path), row) for row in rows)
    for path, chunks in tensors:
        if (rank := _rank(path)) == seeker.rank:
            taken.parts[path[:-1]] = chunks
        elif rank is None and marker._takes(path):
            taken.parts[path] = chunks
            taken.used.add(chunks[0].name)
    return taken


def _of_all_ranks(
    leaf: Leaf, found: FoundRows, tensors: Sequence[tuple[Path, list[Chunk]]], seeker: Seeker, taken: SavedParts
) -> SavedParts:
    """What a marker takes of what another number of ranks have saved, each for itself."""
    by_rank: dict[int, dict[Path, Part]] = {rank: {} for rank in range(seeker.saved)}
    for row in found.every:
        if (path := beneath(leaf.name, parse_path(row.path))) is not None:
            for rank in row.ranks:
                by_rank[rank][path] = row
    for path, chunks in tensors:
        own = _rank(path)
        for rank in by_rank if own is None else [own]:
            by_rank[rank][path if own is None else path[:-1]] = chunks
        taken.used.add(chunks[0].name)
    taken.merges = isinstance(leaf.value, ObjectMarker) and leaf.value.merges
    if taken.merges:
        taken.parts = {(rank, *path): part for rank, parts in by_rank.items() for path, part in parts.items()}
        return taken
    contents = {rank: {path: _content(part) for path, part in parts.items()} for rank, parts in by_rank.items()}
    alike = all(content == contents[0] for content in contents.values())
    if seeker.rank < seeker.saved or alike:
        taken.parts = by_rank[seeker.rank if seeker.rank < seeker.saved else 0]
    else:
        taken.absent = any(by_rank.values())
    if not alike:
        kept = [contents[rank] for rank in range(min(seeker.world_size, seeker.saved))]
        for rank, parts in contents.items():
            for path, content in parts.items():
                if seeker.world_size > seeker.saved or all(other.get(path) != content for other in kept):
                    taken.lost.setdefault(".".join([leaf.name, *map(part_text, path)]), []).append(rank)
    return taken


def _content(part: Part) -> object:
    """Equal for equal values, and only for equal tensors: those that are stored otherwise are named, and not given to others."""
    if isinstance(part, Value):
        return part.text
    first = part[0]
    return first.kind, first.dtype, first.shape, {chunk.offset: (chunk.raw_digest, chunk.proof) for chunk in part}


def _tensors(name: str, found: FoundRows) -> Iterator[tuple[Path, list[Chunk]]]:
    """The tensors at and beneath a name, by path from there."""
    for tensor, chunks in found.chunks.items():
        if chunks and (tensor == name or tensor.startswith(f"{name}.")):
            path = beneath(name, parse_path(chunks[0].path))
            if path is not None:
                yield path, chunks


def _beneath(name: str, path: str) -> Path:
    found = beneath(name, parse_path(path))
    assert found is not None
    return found


def _rank(path: Path) -> int | None:
    return rank_of(path[-1]) if path else None


def target(version: Version, rows: Sequence[Chunk], device: str | torch.device) -> Elements | np.generic:
    """Memory for a tensor or array of a version, whose coverage is checked first; a numpy scalar itself."""
    first = rows[0]
    version.check_covered(first.name, rows)
    if first.kind == SCALAR:
        scalar: np.generic = version.assemble(first.name, rows)
        return scalar
    if first.kind == TENSOR:
        try:
            import torch
        except ImportError:
            pass
        else:
            dtype = getattr(torch, first.dtype, None)
            if dtype is None:
                raise Unsupported(f"torch {torch.__version__} has no {first.dtype}", subject=first.name, remedy="upgrade torch")
            try:
                return torch.empty(first.shape, dtype=dtype, device=device)
            except (RuntimeError, AssertionError) as error:  # no such device, or not enough memory
                raise StateError(f"no memory for {first.dtype} {first.shape}: {error}", subject=first.name) from error
    return np.empty(first.shape, dtypes.to_numpy(first.dtype))


def load(row: Value) -> object:
    """The value of a row."""
    return values.loads(row.text)
