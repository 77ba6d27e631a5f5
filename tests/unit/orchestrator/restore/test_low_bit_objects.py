"""Objects with tensors that consist of others: modules are restored in place, optimizers in dicts only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.local_cluster import LocalCluster
from helpers.wrapper_classes import Quantized
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import raystow


def saved(folder: Path, state: Any) -> raystow.Version:
    with LocalCluster(str(folder)) as cluster:
        return cluster.save(state, step=5)


def test_parameters_that_consist_of_tensors_are_filled(tmp_path: Path) -> None:
    def made() -> nn.Module:
        net = nn.Linear(4, 4)
        net.register_parameter("codes", nn.Parameter(Quantized.random((4, 4)), requires_grad=False))
        return net

    net, again = made(), made()
    raystow.restore(saved(tmp_path, {"model": net}), {"model": again})
    assert again.codes.same(net.codes)  # type: ignore[operator, union-attr]
    assert torch.equal(again.weight, net.weight)  # type: ignore[arg-type]


def test_low_bit_state_of_an_optimizer_is_refused(tmp_path: Path) -> None:
    """It is restored in dicts, which have tensors like those that were saved."""
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[net.weight]["momentum_buffer"] = Quantized.random((4, 4))
    version = saved(tmp_path, {"model": net, "optim": optimizer})
    with pytest.raises(raystow.StateError) as error:
        raystow.restore(version, {"model": net, "optim": optimizer})
    assert error.value.subject == 'into["optim"].state_dict()["state"]["weight"]["momentum_buffer"]'
    assert error.value.remedy.startswith("pass get_state_dict(model, optimizer), made after a step")
    before = optimizer.state[net.weight]["momentum_buffer"]
    into = {"model": net, "optim": {**get_state_dict(net, optimizer)[1]}}
    into["optim"]["state"]["weight"]["momentum_buffer"] = other = Quantized.random((4, 4))
    raystow.restore(version, into)
    assert other.same(before)
