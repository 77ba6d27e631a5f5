"""A ``Checkpointer`` in memory, for callbacks of trainers."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch

from raystow.orchestrator.save.state_tree import flatten
from raystow.storage.errors import SaveFailed


class MemoryRun:
    """Keeps the state and the metrics of each step. It restores only into the tensors of the save."""

    def __init__(self) -> None:
        self.saved: dict[int, tuple[dict[str, Any], dict[str, float]]] = {}
        self.waited: list[int] = []
        self.error: SaveFailed | None = None

    def save(self, state: dict[str, Any], *, step: int, metrics: dict[str, float]) -> None:
        flatten(state)
        assert all(type(value) in (bool, int, float) for value in metrics.values())
        self.saved[step] = copy.deepcopy(state), metrics

    def fence(self) -> None:
        pass

    def wait(self) -> None:
        self.waited.append(max(self.saved, default=0))
        if self.error is not None:
            raise self.error

    def restore(self, into: dict[str, Any], version: Any = "latest") -> Any:
        if not self.saved:
            return None
        saved = self.saved[max(self.saved)][0]
        assert _tensors(into) == _tensors(saved)
        _fill(into, saved)
        return SimpleNamespace(attempt="first")


class PreemptedRun(MemoryRun):
    """The look with this number tells that a node will be removed."""

    def __init__(self, look: int) -> None:
        super().__init__()
        self._look, self._looks = look, 0

    def preempted(self) -> bool:
        self._looks += 1
        return self._looks == self._look


def _tensors(state: dict[str, Any]) -> set[str]:
    return {leaf.name for leaf in flatten(state) if leaf.is_tensor}


def _fill(into: dict[str, Any], saved: dict[str, Any]) -> None:
    for key, value in saved.items():
        if isinstance(value, dict):
            _fill(into[key], value)
        elif torch.is_tensor(value):
            into[key].detach().copy_(value)
        else:
            into[key] = value
