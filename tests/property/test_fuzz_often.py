"""Run every fuzz target on thousands of changed inputs, for ``make soak``."""

from __future__ import annotations

import pytest
from fuzz.seeds import seeds
from fuzz.targets import TARGETS, allowed
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=2_000, deadline=10_000)
@given(data=st.data())
def test_changed_bytes_raise_only_raystow_errors(target: str, data: st.DataObject) -> None:
    whole = bytearray(data.draw(st.sampled_from(seeds()[target])))
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(whole)))
        whole[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    allowed(lambda: TARGETS[target](bytes(whole)))
