"""A tensor that changes during its save fails the save, and the error names the tensor; the next save succeeds."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.local_cluster import LocalCluster

import raystow
from raystow.storage.runtime.clock import SYSTEM

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

MIB = 1 << 20


@pytest.fixture
def uri(options: dict[str, Any]) -> Iterator[str]:
    if options.get("process") == "node":  # another process, which cannot read the memory of this one
        with tempfile.TemporaryDirectory(prefix="raystow-", dir="/dev/shm") as folder:
            yield folder
    else:
        yield f"memory://changed-{SYSTEM.token()}"


@pytest.mark.parametrize(
    ("options", "layers", "changed"),
    [
        # The transfer of 1 GiB through a ring of 112 MiB takes longer than 0.03 s.
        pytest.param({"memory": 128 * MIB, "threads": 1}, 8, "layer", id="coded in the training process"),
        pytest.param({"memory": 128 * MIB, "threads": 1}, 8, "small", id="a small tensor"),
        pytest.param({"memory": 128 * MIB, "threads": 1, "host": 0}, 8, "layer", id="in host memory, coded by the GPU"),
        # The copy of 2 GiB for the node worker takes longer than 0.03 s.
        pytest.param({"memory": 256 * MIB, "process": "node"}, 16, "layer", id="coded in the node worker"),
    ],
)
def test_a_tensor_changed_during_its_save_is_named(uri: str, options: dict[str, Any], layers: int, changed: str) -> None:
    device = "cpu" if "host" in options else "cuda"
    state = {f"layer{i}": torch.randn(32 * MIB, device="cuda").mul(0.02).to(device) for i in range(layers)}
    state["small"] = torch.zeros(9, device="cuda")

    def change() -> None:
        threading.Event().wait(0.03)  # by then the save has begun and has not ended
        for name, tensor in state.items():
            if name.startswith(changed):
                tensor.add_(1)
        torch.cuda.synchronize()

    with LocalCluster(uri, **options) as cluster:
        cluster.save(state, step=0)
        changing = threading.Thread(target=change)
        changing.start()
        with pytest.raises(raystow.SaveFailed, match=rf"{changed}\d?.*changed while it was being saved"):
            cluster.save(state, step=1)
        changing.join()
        version = cluster.save(state, step=2)
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        assert raystow.restore_latest(cluster.uri, into=into).id == version.id
    for name, tensor in state.items():
        assert torch.equal(into[name], tensor), name
