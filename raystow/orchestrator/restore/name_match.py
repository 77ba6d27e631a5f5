"""Matches the names in ``into`` with those that a version holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from ...state.as_saved import AsSaved
from ...state.object_marker import ObjectMarker
from ...state.tree import Leaf, Path, State, flatten, show
from ...state.wrapper_tensors import ShardPart, WrapperText
from ...storage.coding.digest import stored_digest
from ...storage.errors import StateError
from ...storage.format.manifest import Value
from ...storage.versions.tensor_index import Finder, Seeker
from ...storage.versions.value_tree import part_text
from .plain_containers import PlainNode, by_container, is_same, match_values
from .saved_parts import SavedParts, is_per_rank, load, saved_parts

_PLACES = 3  # containers that an advice names


@dataclass(frozen=True)
class NameMatch:
    """Names of both sides. ``used``: names of the version that are restored, and those that other ranks have in containers that
    are; ``rows``: the values that are restored. ``missing``: leaves of ``into`` that the version lacks. ``tensors``, ``values``:
    names that this rank leaves unused.

    ``new``: values and containers that replace parts of ``into``; ``whole``: leaves that are replaced by a tensor or by a
    numpy scalar; ``marked``: what is in the place of each marker; ``lost``: see ``SavedParts``. ``places``: the containers and
    plain values in ``into``, by name. ``objects``: the places of objects that all ranks share. ``lent``: the places of what each
    rank has for itself, with the only rank that has saved, whose they are. ``elsewhere``: names that this rank neither restores
    nor leaves unused, and names around those: the descriptions of tensors, which are compared, and tensors of other ranks.
    """

    used: set[str] = field(default_factory=set)
    rows: list[Value] = field(default_factory=list)
    missing: list[Leaf] = field(default_factory=list)
    tensors: set[str] = field(default_factory=set)
    values: set[str] = field(default_factory=set)
    new: dict[Path, object] = field(default_factory=dict)
    whole: list[Leaf] = field(default_factory=list)
    marked: dict[Path, SavedParts] = field(default_factory=dict)
    lost: dict[str, list[int]] = field(default_factory=dict)
    lent: dict[str, list[int]] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)
    places: dict[str, Path] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)

    def leaves(self, name: str) -> bool:
        """Whether a name of the version is left to nobody else, and not restored."""
        return name not in self.used and not is_within(name, self.elsewhere)

    def advice(self, names: Iterable[str]) -> str:
        """What to do about names in containers that both sides have."""
        there = {around for name in (*self.used, *self.tensors, *self.values) for around in _around(name)}
        found = dict[str, Path]()
        for name in names:
            both = [around for around in _around(name) if around in self.places and around in there]
            if both:
                found[both[-1]] = self.places[both[-1]]
        shown = [show(path, "into") for _, path in sorted(found.items())]
        more = f" and {len(shown) - _PLACES} more" if len(shown) > _PLACES else ""
        return (
            f"put raystow.AsSaved() in place of {', '.join(shown[:_PLACES])}{more} to get what was saved there" if shown else ""
        )


def match_names(
    leaves: Sequence[Leaf], nodes: Sequence[PlainNode], finder: Finder, seeker: Seeker, *, empty: Collection[str] = ()
) -> NameMatch:
    """Match ``into`` with what a finder has found of it. Reads the rest of a large manifest only if that may change the match.

    ``nodes``: the plain values and containers among the ``leaves``. ``empty``: the tensors of which this rank has no elements;
    where other ranks have tensors that consist of others, the version has other names.
    """
    shards = {leaf.name.removesuffix(f".{leaf.path[-1]}") for leaf in leaves if isinstance(leaf.value, ShardPart)}
    described = {leaf.name for leaf in leaves if isinstance(leaf.value, WrapperText)}
    found, match = finder.found, NameMatch(elsewhere={*empty, *shards, *described})
    around = by_container(found.values.values())
    if not finder.complete and not all(is_same(node, found.values, around) for node in nodes):
        around = by_container(finder.read_all().values.values())
    for leaf in leaves:
        if isinstance(leaf.value, AsSaved):
            match.marked[leaf.path] = taken = saved_parts(leaf, found, around, seeker)
            restored = [row for row in taken.parts.values() if isinstance(row, Value)]
            match.used.update(taken.used)
            match.used.update(row.name for row in around.get(leaf.name, ()) if restored or taken.absent)
            if is_per_rank(leaf.value):
                match.elsewhere.add(leaf.name)  # what other ranks have there is theirs
                match.lost.update(taken.lost)
                if seeker.saved < 2 <= seeker.world_size and taken.parts and not taken.merges:
                    match.lent[leaf.name] = [0]
            else:
                match.rows.extend(restored)
                if isinstance(leaf.value, ObjectMarker):
                    match.objects.add(leaf.name)
            if not taken.parts and not taken.absent:
                match.missing.append(leaf)
        elif leaf.is_tensor and found.chunks.get(leaf.name):
            match.used.add(leaf.name)
    named = {leaf.name for leaf in leaves if leaf.is_tensor}
    strangers = {part for name in found.names - match.used - named for part in _around(name)}
    plain = match_values(nodes, around, strangers, seeker.rank)
    match.new.update(plain.values)
    match.used.update(plain.used - described)
    match.rows.extend(row for row in plain.rows if row.name not in described)
    match.whole.extend(leaf for leaf in plain.missing if found.chunks.get(leaf.name))
    match.used.update(leaf.name for leaf in match.whole)
    match.missing.extend(leaf for leaf in plain.missing if leaf.name not in match.used)
    for leaf in leaves:
        if leaf.is_tensor and leaf.name not in match.used and not isinstance(leaf.value, AsSaved):
            if (row := found.values.get(leaf.name)) is not None:
                match.new[leaf.path] = load(row)
                match.used.add(leaf.name)
                match.rows.append(row)
            elif leaf.name not in empty:
                match.missing.append(leaf)
    match.tensors.update(filter(match.leaves, found.names))
    own = (name for name, row in found.values.items() if seeker.rank in row.ranks or seeker.rank >= seeker.saved)
    match.values.update(filter(match.leaves, own))
    match.places.update(_places(leaves))
    return match


def names_digest(into: State) -> int:
    """A number that differs between ranks if they restore tensors of different names; 0 for a state that cannot be restored."""
    try:
        leaves = flatten(into, what="into", placeholders=True)
    except StateError:
        return 0  # the restore raises it
    names = sorted(leaf.name if leaf.is_tensor else part_text(leaf.path[0]) for leaf in leaves)
    return int.from_bytes(stored_digest("\0".join(dict.fromkeys(names)).encode())[:8], "little")


def name_bits(names: Sequence[str], chosen: Collection[str]) -> bytes:
    """A bit for each name, set for those chosen."""
    chosen = {*chosen}
    flags = np.fromiter((name in chosen for name in names), bool, len(names))
    return np.packbits(flags, bitorder="little").tobytes()


def named(names: Sequence[str], bits: bytes) -> list[str]:
    """The names whose bits are set."""
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return [name for name, flag in zip(names, flags.tolist(), strict=False) if flag]


def is_within(name: str, others: Collection[str]) -> bool:
    """Whether a name is one of the others, or its keys begin with those of one."""
    return bool(others) and any(around in others for around in _around(name))


def _places(leaves: Sequence[Leaf]) -> Mapping[str, Path]:
    """Where an ``AsSaved`` may stand."""
    wrappers = {leaf.path[:-1] for leaf in leaves if isinstance(leaf.value, WrapperText)}
    found = {leaf.name: leaf.path for leaf in leaves if not leaf.is_tensor and leaf.path[:-1] not in wrappers}
    for leaf in leaves:
        name, path = leaf.name, leaf.path
        while len(path) > 1:
            name, path = name[: -1 - len(str(path[-1][1] if isinstance(path[-1], tuple) else path[-1]))], path[:-1]
            if name in found:
                break
            if path not in wrappers:
                found[name] = path
    return found


def _around(name: str) -> Iterable[str]:
    """A name and those that may be the names of containers around it."""
    return accumulate(name.split("."), lambda around, own: f"{around}.{own}")
