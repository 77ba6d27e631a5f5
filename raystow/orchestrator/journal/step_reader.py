"""Reads recorded steps: the entry of this rank, or those of other ranks that have its shards together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, cast

import torch

from ...state import value_text
from ...state.tree import State
from ...storage.errors import Damaged, StateError
from ...storage.format.boxes import Box
from ...workers.protocol.messages import EntryPlace, OptimizerStep
from .entry_decoder import EntryDecoder
from .entry_file import JournalEntry, parse
from .gradient_coding import decode
from .shard_map import ShardMap, layout
from .step_hooks import StepInputs
from .tracked_state import TrackedState, local


class DecodedStep(NamedTuple):
    """A step, ready to be replayed: gradients on the devices of their parameters unless they were put together, the rest in host
    memory.

    Args:
        entry: Whose hyper-parameters, buffers and values count: this rank's, or rank 0's.
        entries: All that were read, by rank.
        shards: How they were put together; None if the entry is this rank's.
    """

    entry: JournalEntry
    entries: Mapping[int, JournalEntry]
    shards: ShardMap | None
    steps: list[StepInputs]
    groups: list[list[dict[str, object]]]
    buffers: dict[str, torch.Tensor]
    module_values: State


class StepReader:
    """Steps must be read in order. Call ``close`` at last.

    Args:
        fetch: Returns the bytes of an entry, which are valid until it is called with the same number again.
    """

    def __init__(self, state: TrackedState, fetch: Callable[[EntryPlace, int], memoryview], world_size: int) -> None:
        self._state, self._fetch, self._world_size, self._decoder = state, fetch, world_size, EntryDecoder()
        self._fetching, self._fetches = ThreadPoolExecutor(1, "raystow-fetch"), 0
        self._coming: tuple[EntryPlace, Future[memoryview]] | None = None
        self._layouts: dict[tuple[int, int], tuple[Box, ...]] = {}  # by number of ranks and rank
        self._mine: tuple[Box, ...] = ()
        numbers = {id(parameter): number for number, parameter in enumerate(state.all_parameters())}
        self._numbers = [[numbers[id(one)] for one in state.parameters(at)] for at in range(len(state.optimizers))]

    def read(self, places: Sequence[EntryPlace], following: Sequence[EntryPlace] = ()) -> DecodedStep:
        """Read a step.

        Args:
            places: The entry of this rank, or those of all ranks if they were another number.
            following: Those of the step that is read next; an entry of this rank is fetched while this step is decoded.
        """
        if places[0].info.world_size == self._world_size:
            content = self._fetched(places[0])
            if following and following[0].info.world_size == self._world_size:
                self._fetch_ahead(following[0])
            entry = parse(places[0].info, content)
            return self._decoded(entry, {entry.info.rank: entry}, None)
        entries, shards = self._covering({place.info.rank: place for place in places})
        return self._decoded(entries[0], entries, shards)

    def close(self) -> None:
        """Free the memory for decoding."""
        self._fetching.shutdown()
        self._decoder.close()

    def _fetched(self, place: EntryPlace) -> memoryview:
        """The bytes of this rank's entry, which may have been fetched ahead."""
        if self._coming is None or self._coming[0] != place:
            self._fetch_ahead(place)
        assert self._coming is not None
        (_, content), self._coming = self._coming, None
        return content.result()

    def _fetch_ahead(self, place: EntryPlace) -> None:
        self._fetches += 1  # two entries at a time: one is decoded, one fetched
        self._coming = place, self._fetching.submit(self._fetch, place, self._fetches % 2)

    def _covering(self, places: Mapping[int, EntryPlace]) -> tuple[dict[int, JournalEntry], ShardMap]:
        """The entry of rank 0, and those of ranks that have this rank's shards together. ``places``: the best guess first."""
        self._mine = self._mine or layout(self._state)
        ranks = len(places)
        known = {rank: self._layouts[ranks, rank] for rank in places if (ranks, rank) in self._layouts}
        entries = dict[int, JournalEntry]()
        needed = ShardMap(self._mine, known).ranks()
        for rank in dict.fromkeys((0, *sorted(needed), *places)):
            place = places[rank]
            content = self._fetching.submit(self._fetch, place, len(entries)).result()
            entries[rank] = entry = parse(place.info, content)
            if entry.header.layout:
                self._layouts[ranks, rank] = entry.header.layout
            if len(self._layouts.get((ranks, rank), ())) != len(self._mine):
                raise StateError(f"rank {rank} of {ranks} had other parameters, or parts of them that are not boxes")
            shards = ShardMap(self._mine, {read: self._layouts[ranks, read] for read in entries})
            if shards.complete:
                return entries, shards
        raise StateError(f"the parts of {ranks} ranks are not those of {self._world_size}: parameters have other shapes")

    def _decoded(self, entry: JournalEntry, entries: Mapping[int, JournalEntry], shards: ShardMap | None) -> DecodedStep:
        header = entry.header
        counts = {len(one.header.steps) for one in entries.values()}
        if counts != {len(header.steps)}:
            raise StateError("ranks have called step() of their optimizers at different numbers of times")
        steps = [self._inputs(at, header.steps[at], entries, shards) for at in range(len(header.steps))]
        buffers = {name: tensor for name, one in header.buffers if (tensor := decode(one, entry.data)) is not None}
        value_text.loads(header.values)
        groups = [_groups(groups) for groups in header.groups]
        return DecodedStep(entry, entries, shards, steps, groups, buffers, cast(State, value_text.loads(header.module_values)))

    def _inputs(self, at: int, step: OptimizerStep, entries: Mapping[int, JournalEntry], shards: ShardMap | None) -> StepInputs:
        """What ``step``, the one with number ``at`` in all entries, was given."""
        known = 0 <= step.optimizer < len(self._numbers)
        numbers = self._numbers[step.optimizer] if known else []
        recorded = {rank: one.header.steps[at] for rank, one in entries.items()}
        if any(one.optimizer != step.optimizer or len(one.gradients) != len(numbers) for one in recorded.values()):
            raise StateError("the step was recorded with other optimizers, or other parameters in them")
        host = torch.device("cpu")
        parameters = self._state.parameters(step.optimizer) if known else []
        devices = [host if shards is not None else local(one).device for one in parameters]
        found = {rank: self._decoder.decode(one.gradients, entries[rank].data, devices) for rank, one in recorded.items()}
        if shards is None:
            (gradients,) = found.values()
        else:
            gradients = [
                shards.assembled(number, {rank: mine[at] for rank, mine in found.items()}) for at, number in enumerate(numbers)
            ]
        scale = _dict(value_text.loads(step.scale or '["d",[]]'))
        return StepInputs(step.optimizer, _groups(step.groups), gradients, scale)


def _groups(texts: Sequence[str]) -> list[dict[str, object]]:
    return [_dict(value_text.loads(text)) if text else {} for text in texts]


def _dict(tree: object) -> dict[str, object]:
    if not isinstance(tree, dict):
        raise Damaged("hyper-parameters that are no dict")
    return tree
