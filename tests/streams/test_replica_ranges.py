"""The digests that ranks compare are the same on a device as on the host, in any order of streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.chunk_sources import Source

from raystow.state.replica_digests import RangeDigest, first_difference
from raystow.storage.coding.digest import raw_digest
from raystow.workers.gpu.replica_ranges import DeviceRanges
from streams.device import SEEDS, Device
from streams.encoder_run import HERE, weights

seeds = pytest.mark.parametrize("gpu", SEEDS, indirect=True)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float8_e5m2, torch.int64, torch.int16, torch.uint8)


def on_host(source: Source) -> RangeDigest:
    raw = np.frombuffer(source.bytes, np.uint8)
    return RangeDigest(raw_digest(raw), raw_digest(raw[: source.dtype.itemsize]))


@seeds
def test_the_device_and_the_host_compute_the_same_digests(gpu: Device) -> None:
    sources = [Source("one", weights(1)), Source("transposed", weights(6_000).reshape(60, 100).t())]
    for dtype in DTYPES:
        sources += [Source(f"{dtype}{n}", (100 * weights(n)).to(dtype)) for n in (1, 7, 5_003)]
    ranges: Any = sources
    of_device = DeviceRanges(HERE, ranges)
    numbers = of_device.take(gpu.default.record_event())()
    assert [RangeDigest(*map(int, column)) for column in numbers.T] == [on_host(source) for source in sources]
    sources[0].tensor.add_(1)  # in later saves the same tables are used
    again = of_device.take(gpu.default.record_event())()
    assert RangeDigest(*map(int, again[:, 0])) == on_host(sources[0])
    assert (again[:, 1:] == numbers[:, 1:]).all()


@seeds
def test_a_flipped_bit_on_a_device_is_found(gpu: Device) -> None:
    held = weights(20_000).bfloat16()
    tensors = [held, held.clone()]
    tensors[1].view(torch.int16)[11_001] ^= 1 << 9
    ranges: Any = [Source(str(i), tensor) for i, tensor in enumerate(tensors)]
    numbers = DeviceRanges(HERE, ranges).take(gpu.default.record_event())()
    one, other = (RangeDigest(*map(int, column)) for column in numbers.T)
    assert first_difference(one, other, nbytes=40_000, itemsize=2) == (11_001, True)
