"""Damaged segments shorten a replay, which always ends in a recorded state of the training."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from helpers.segment_run import SegmentRun, begin, record, replay, states
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.storage.format import keys

STEPS = 6
FIRST_STATES = cache(states)


@settings(max_examples=25)
@given(
    st.sampled_from(["flip", "cut", "gone", "other"]),
    st.integers(0, STEPS - 1),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, STEPS - 1),
)
def test_a_replay_of_damaged_segments_ends_in_a_recorded_state(damage: str, number: int, where: float, other: int) -> None:
    """Three segments have six objects (entries and a record each); object ``number`` is damaged at the fraction ``where``."""
    with tempfile.TemporaryDirectory() as folder:
        run = SegmentRun(Path(folder))
        training, journal = begin(run)
        record(run, journal, training, range(1, STEPS + 1))
        journal.close()
        store = run.repository.store
        objects = [info.key for info in store.list(keys.SEGMENTS)]
        assert len(objects) == STEPS
        content = bytearray(store.get(objects[number], max_bytes=1 << 30))
        place = int(where * len(content))
        if damage == "flip":
            content[place] ^= 1 << other
        elif damage == "cut":
            del content[place:]
        elif damage == "other":
            content[:] = store.get(objects[other], max_bytes=1 << 30)
        store.put(objects[number], [content])
        if damage == "gone":
            store.delete([objects[number]])
        run.start()
        reached, bits = replay(run)
        assert bits == FIRST_STATES(STEPS)[reached or 0]
        assert (reached or 0) >= 2 * (number // 2)  # at least all steps before the damaged segment
