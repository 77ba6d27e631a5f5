"""``FreshStart``: the structure of ``into`` of a restore that has found no version.

The next start of the training passes the same ``into``, so it must match what the training saves: this compares both as a restore
would, without a version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...state.as_saved import AsSaved
from ...state.planner import SavePlan
from ...state.shards import shard_of
from ...state.tree import Leaf, State, boxes, flatten, show
from ...state.wrapper_tensors import WrapperText
from ...storage.coding.chunk import Coding
from ...storage.errors import StateError
from ...storage.format.manifest import TENSOR, Chunk, Value, path_text
from ...storage.format.selection import Selection
from ...storage.versions.tensor_index import Finder, Seeker
from .name_check import differences
from .name_match import NameMatch, match_names
from .name_patterns import ANY_NAMES, STRICT, NameRules
from .plain_containers import plain_nodes

_CODING = Coding(planes=False, rotated=False, codecs=(), stored=())


@dataclass(frozen=True)
class FreshStart:
    """``leaves``: of ``into``, without its tensors and objects. ``kinds``: dtype and shape of each tensor by name; no dtype if it
    may be another one. ``rules``: of the restore."""

    leaves: Sequence[Leaf]
    kinds: Mapping[str, tuple[str, tuple[int, ...]]]
    rules: NameRules

    @staticmethod
    def of(into: State, rules: NameRules, *, cast: bool = False) -> FreshStart:
        leaves = flatten(into, what="into", placeholders=True)
        kinds = {leaf.name: kind for leaf in leaves if leaf.is_tensor and (kind := _kind(leaf, cast=cast)) is not None}
        return FreshStart([_light(leaf) for leaf in leaves], kinds, rules)

    def difference(self, plan: SavePlan) -> str:
        """How the restore of a save that was planned would not match, with a remedy; "" if it would."""
        if changed := self._changed(plan):
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            what = f"a restart fails, because its `into` differs from this state: {changed[0]}{more}"
            return f"{what}; make them match, or save what grows as an object with state_dict() and load_state_dict()"
        if self._has_names_of(plan):
            return ""
        match = self._match(plan)
        lenient = self.rules == ANY_NAMES
        rules = STRICT if lenient else self.rules
        missing = sorted(leaf.name for leaf in match.missing if leaf.name not in rules.missing)
        unused = sorted(name for name in {*match.tensors, *match.values} if name not in rules.unused)
        if not missing and not unused:
            return ""
        end = "leaves this out" if lenient else "fails"
        what = f"a restart {end}, because its `into` differs from this state: {'; '.join(differences(missing, unused))}"
        return "; ".join([what, " or ".join(filter(None, ["make them match", match.advice((*missing, *unused))]))])

    def _changed(self, plan: SavePlan) -> list[str]:
        """The tensors that both sides have, of another dtype or shape."""
        found = list[str]()
        for view in plan.views:
            dtype, shape = self.kinds.get(view.leaf.name, ("", None))
            saved = view.shard.dtype, view.shard.shape
            if shape is not None and (dtype or saved[0], shape) != saved:
                found.append(f"{show(view.leaf.path, 'into')} was {f'{dtype} {shape}'.lstrip()}, {saved[0]} {saved[1]} is saved")
        return found

    def _has_names_of(self, plan: SavePlan) -> bool:
        """Whether all names are equal, as they mostly are: a match of thousands of names takes long."""
        saved = {view.leaf.name for view in plan.views}.union(name for name, _, _ in plan.values)
        markers = {leaf.name for leaf in self.leaves if isinstance(leaf.value, AsSaved)}
        within = tuple(f"{name}." for name in markers)
        taken = {name for name in saved if name in markers or name.startswith(within)}
        filled = all(name in taken or any(other.startswith(f"{name}.") for other in taken) for name in markers)
        return filled and saved - taken == {leaf.name for leaf in self.leaves} - markers

    def _match(self, plan: SavePlan) -> NameMatch:
        seeker = Seeker(plan.rank, plan.world_size, plan.world_size)
        finder = Finder([], _read_nothing, seeker)
        found = finder.found
        found.values.update((name, Value(name, path, text, (plan.rank,))) for name, path, text in plan.values)
        for leaf in {view.leaf.name: view.leaf for view in plan.views}.values():
            found.chunks[leaf.name].append(
                Chunk(leaf.name, path_text(leaf.path), TENSOR, "", (), (), (), 0, "", 0, 0, _CODING, 0, b"")
            )
        found.names.update(found.chunks)
        return match_names(self.leaves, plain_nodes(self.leaves), finder, seeker)


def _read_nothing(*_: object) -> Selection:
    raise AssertionError("there are no fragments")


def _kind(leaf: Leaf, *, cast: bool) -> tuple[str, tuple[int, ...]] | None:
    """The dtype and shape of a tensor that a restore fills; None for what it replaces, or refuses."""
    if isinstance(leaf.value, AsSaved | np.generic):
        return None
    try:
        parts = boxes(leaf, "into")
        shard = shard_of(parts[0], rank=0, what="into") if parts else None
    except StateError:
        shard = None
    if shard is None:
        return None
    return "" if cast else shard.dtype, shard.shape


def _light(leaf: Leaf) -> Leaf:
    if isinstance(leaf.value, WrapperText):
        return leaf
    return leaf._replace(value=AsSaved() if isinstance(leaf.value, AsSaved) else None)
