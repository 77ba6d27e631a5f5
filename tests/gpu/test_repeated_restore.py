"""A restore that ran out of device memory leaves no pinned memory behind, and can be repeated."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers.local_cluster import LocalCluster

import raystow
from raystow.workers.gpu.decode.lane import Lane

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]


@pytest.mark.parametrize("lane", [0, 1])
def test_a_restore_that_ran_out_of_memory_can_be_repeated(lane: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second restore needs pinned memory where that of the first one may have been."""
    allocate, calls = Lane._allocate, list[int]()

    def full(self: Lane, nbytes: int) -> torch.Tensor:
        calls.append(nbytes)
        if len(calls) > 5 * lane:  # each lane has five parts
            raise torch.OutOfMemoryError("no device memory")
        return allocate(self, nbytes)

    state = {"w": torch.randn(40 << 20, device="cuda")}  # more than a lane
    with LocalCluster("memory://full", memory=256 << 20) as cluster:
        cluster.save(state, step=0)
        into = {"w": torch.zeros_like(state["w"])}
        with monkeypatch.context() as patch:
            patch.setattr(Lane, "_allocate", full)
            with pytest.raises(Exception, match="no device memory"):
                raystow.restore_latest(cluster.uri, into=into)
        gc.collect()
        raystow.restore_latest(cluster.uri, into=into)
        assert torch.equal(into["w"], state["w"])
