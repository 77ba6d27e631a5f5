"""A tensor that changes while it is saved, whatever reads it: the save fails and names it, and the next save is whole."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from local_cluster import LocalCluster

import raystow
from raystow.storage.clock import SYSTEM

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

MIB = 1 << 20


@pytest.fixture
def uri(options: dict[str, Any]) -> Iterator[str]:
    if options.get("process") == "node":  # by another process, which sees none of this one's memory
        with tempfile.TemporaryDirectory(prefix="raystow-", dir="/dev/shm") as folder:
            yield folder
    else:
        yield f"memory://changed-{SYSTEM.token()}"


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        # A GiB needs longer than 0.03 s to leave by a ring of 112 MiB.
        pytest.param({"memory": 128 * MIB, "threads": 1}, 8, id="coded in the training process"),
        # Two GiB need longer than that to be copied for the node worker.
        pytest.param({"memory": 256 * MIB, "process": "node"}, 16, id="coded in the node worker"),
    ],
)
def test_a_tensor_that_changes_while_it_is_saved_is_named(uri: str, options: dict[str, Any], layers: int) -> None:
    state = {f"layer{i}": torch.randn(32 * MIB, device="cuda") * 0.02 for i in range(layers)}

    def change() -> None:
        threading.Event().wait(0.03)  # the save has begun, and is not over
        for tensor in state.values():
            tensor.add_(1)
        torch.cuda.synchronize()

    with LocalCluster(uri, **options) as cluster:
        cluster.save(state, step=0)
        changing = threading.Thread(target=change)
        changing.start()
        with pytest.raises(raystow.SaveFailed, match=r"layer\d.*changed while it was being saved"):
            cluster.save(state, step=1)
        changing.join()
        version = cluster.save(state, step=2)
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        assert raystow.restore_latest(cluster.uri, into=into).id == version.id
    for name, tensor in state.items():
        assert torch.equal(into[name], tensor), name
