"""Stages chunks in host memory: copies them into slots of the ring as they are, except those that follow from others."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np

from ...state.planned_chunk import DeviceChunks, PlannedDerived
from ...state.planner import SavePlan
from ...storage.coding.derived import followed
from ...storage.coding.kernels import Bytes
from ..protocol.messages import DerivedChunk, Message, RawChunk, StageDerived, StageRaw
from ..shm.ring import ALIGN
from .staging_slots import StagingSlots


def stage_host(plan: SavePlan, group: DeviceChunks, slots: StagingSlots, post: Callable[[Message], None]) -> None:
    """Copy the chunks of ``group``, and announce each slot when it is full."""
    followers: dict[int, list[PlannedDerived]] = defaultdict(list)
    for follower in group.followers:
        followers[id(follower.source)].append(follower)
    left, ring = deque(group.pieces), slots.ring
    slot, used, raw, derived = -1, 0, list[RawChunk](), list[DerivedChunk]()
    try:
        while left:
            piece = left.popleft()
            if slot >= 0 and used + piece.nbytes > ring.slot_size:
                _announce(raw, derived, post)
                slots.release([slot])
                slot = -1  # not released again if the save fails before another one is free
            if slot < 0:
                slot, used = slots.take(), 0
            place = ring.slot(slot)[used : used + piece.nbytes]
            piece.copy(place)
            raw.append(RawChunk(piece.describe(), slot, used, piece.nbytes))
            used += -(-piece.nbytes // ALIGN) * ALIGN
            for follower in followers.get(id(piece), ()):
                if (digest := _followed(follower, place)) is not None:
                    derived.append(follower.derived(digest))
                else:
                    plan.not_derived(follower)
                    left.append(follower.piece)
        _announce(raw, derived, post)
    finally:
        if slot >= 0:
            slots.release([slot])


def _announce(raw: list[RawChunk], derived: list[DerivedChunk], post: Callable[[Message], None]) -> None:
    if raw:
        post(StageRaw(tuple(raw)))
    if derived:
        post(StageDerived(tuple(derived)))
    raw.clear()
    derived.clear()


def _followed(follower: PlannedDerived, words: Bytes) -> int | None:
    """Return the digest of a chunk in host memory if it follows from these words, which are as they will be stored."""
    raw = np.empty(follower.piece.nbytes, np.uint8)
    follower.piece.copy(raw)
    return followed(raw, words, follower.source.dtype.name, follower.piece.dtype.name)
