"""Ray as the only node of a cluster sees it, without a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from helpers.replaced_parts import replace_parts


class FakeRay:
    """Answers the functions of ``ray`` that ``replace`` names; a test assigns other answers.

    Attributes:
        node: The id of this node.
        joined: The addresses of clusters that this process has tried to join.
        killed: Set when an actor is killed.
    """

    def __init__(self, node: str = "node-0") -> None:
        self.node, self.joined, self.killed = node, list[str](), threading.Event()

    def replace(self, patch: pytest.MonkeyPatch, *functions: str) -> FakeRay:
        """Replace functions of ``ray`` by those of this object, as it has them when they are called."""

        def answer(name: str) -> Callable[..., Any]:
            return lambda *given, **options: getattr(self, name)(*given, **options)

        replace_parts(patch, [(ray, name, answer(name)) for name in functions])
        return self

    def init(self, *_: Any, **options: Any) -> None:
        self.joined.append(options.get("address", ""))

    def is_initialized(self) -> bool:
        return False

    def get(self, reference: Any, *, timeout: float) -> Any:
        raise AssertionError(f"{reference} is awaited")

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": self.node, "Alive": True}]

    def kill(self, actor: object) -> None:
        self.killed.set()

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: self.node, get_job_id=lambda: "1", current_actor=None)
