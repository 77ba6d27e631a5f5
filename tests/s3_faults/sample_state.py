"""Shared by the fault tests: a state to save, the check of a version, and short deadlines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

import raystow
from raystow.storage.stores.request_limits import RequestLimits

MOTO = "RAYSTOW_TEST_S3" not in os.environ
"""Whether the server is moto's, which stores everything in memory and ignores checksums."""
_Case = TypeVar("_Case")


HURRY = RequestLimits(
    connect_seconds=1,
    stall_seconds=1,
    request_seconds=2,
    attempts=3,
    retry_seconds=3,
    single_put_bytes=1 << 20,
    part_bytes=5 << 20,
)
"""Deadlines for tests."""


def cases(everything: Sequence[_Case], *on_moto: _Case) -> Sequence[_Case]:
    """Return all cases on a real server, and only ``on_moto`` on moto's server, where each takes a second or more."""
    return on_moto if MOTO else everything


def two_group_state(seed: int) -> dict[str, Any]:
    """Return a state with a small group (one PUT) and a large group (three parts)."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {"w": torch.randn(100_000, generator=generator)},
        "optim": {"state": {0: {"exp_avg": torch.randn(3 << 20, generator=generator)}}},
        "step": seed,
    }


def check(version: raystow.Version, seed: int) -> None:
    """Assert that a version is ``two_group_state(seed)``, bit for bit."""
    expected = two_group_state(seed)
    assert version.step == seed
    assert torch.equal(version.read("model.w"), expected["model"]["w"])
    assert torch.equal(version.read("optim.state.0.exp_avg"), expected["optim"]["state"][0]["exp_avg"])
