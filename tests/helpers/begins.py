"""The message with which a node worker announces a rank's save, from fields that come from three processes."""

from __future__ import annotations

from typing import Any

from raystow.workers.protocol.messages import Begin, Incarnation, RankSaveRequest, SaveContents

_PLANNED = ("coding", "owned_dtensors", "plain_tensors")


def begin_of(
    rank: int,
    world_size: int,
    process: Incarnation,
    save: int,
    node: str,
    step: int,
    timeout: float = 60.0,
    replicated: int = 0,
    expected: int = 0,
    **fields: Any,
) -> Begin:
    planned = {name: fields.pop(name) for name in _PLANNED if name in fields}
    request = RankSaveRequest(rank, world_size, process, save, step, timeout, **fields)
    return Begin(node, request, SaveContents(replicated, expected, **planned))
