"""Whether a node worker codes tensors in host memory."""

from __future__ import annotations

import pytest

from raystow.storage.coding.chunk import RAW, ZSTD
from raystow.workers.packing.host_coding import HostCoding, sooner


@pytest.mark.parametrize(
    ("store", "cores", "codec"),
    [
        pytest.param(1.0, 0.5, RAW, id="a disk, two cores"),
        pytest.param(1.0, 4.0, ZSTD, id="a disk, sixteen idle cores"),
        pytest.param(1.0, 0.0, RAW, id="no idle core"),
        pytest.param(0.1, 0.5, ZSTD, id="an object store, two cores"),
        pytest.param(5.0, 4.0, RAW, id="memory, sixteen cores"),
    ],
)
def test_coding_is_chosen_if_it_keeps_up_with_the_store(store: float, cores: float, codec: str) -> None:
    choice = sooner(store=store, cores=cores, coding=0.6)
    assert choice.codec == codec
    assert f"{cores:.1f} cores" in choice.why


def test_states_are_coded_until_the_rate_of_the_store_is_known() -> None:
    coding = HostCoding(threads=2)
    assert coding.choose(0.0).codec == ZSTD
    assert coding.choose(1.0).codec == ZSTD
    assert coding.choose(1e15).codec == RAW
