"""The ranks that have the same parts of a state, so that each part is stored once, and by all of them in turn.

Megatron tells of each part whether it is the main one of its replicas, but not where the others are. The ranks exchange digests
of what they have: no elements, and only if it has changed since the last save.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from ...storage.coding.digest import stored_digest
from ...storage.errors import StateError

_ROW = np.dtype([("name", "<u8"), ("form", "<u8"), ("box", "<u8"), ("main", "<u8")])


@dataclass(frozen=True)
class ReplicaPart:
    """A box of a tensor. ``form``: dtype and shape of the tensor. ``main``: whether Megatron stores this one of its replicas."""

    name: str
    form: str
    box: str
    main: bool


class Replicas:
    """Asks the other ranks, over a process group of its own: the training may use all others at any time."""

    def __init__(self) -> None:
        self._group = distributed.new_group(backend="gloo")
        self._asked = list[bytes]()
        self._holders: list[tuple[int, ...]] = []

    def holders(self, parts: Sequence[ReplicaPart], common: bytes, failure: Exception | None = None) -> list[tuple[int, ...]]:
        """The ranks that have each part, ascending; none for a part whose main replica no rank has. Every rank calls this.

        ``common``: a digest of what must be equal on all ranks. ``failure``: why this rank cannot save. Raises ``StateError``
        on all ranks if one of them cannot, or if two ranks both claim to have the main replica of a part, as pipeline stages do
        whose names are local to them.
        """
        rows = np.array([_row(part) for part in parts], _ROW)
        every = self._gather(bytes([failure is not None]) + _digest(common) + _digest(rows.tobytes()))
        if failed := [rank for rank, one in enumerate(every) if one[0]]:
            self._raise(failure, failed[0])
        if differs := [rank for rank, one in enumerate(every) if one[1:17] != every[0][1:17]]:
            what = f"rank {differs[0]} has other plain tensors than rank 0, and Megatron keeps those of one rank only"
            raise StateError(what, subject="the state", remedy="pass sharded_state_dict() of the model instead of state_dict()")
        if (asked := [one[17:] for one in every]) != self._asked:
            table: list[bytes] = [b""] * len(every)
            distributed.all_gather_object(table, rows.tobytes(), group=self._group)
            self._holders = self._match(parts, [np.frombuffer(one, _ROW) for one in table])
            self._asked = asked
        return self._holders

    def _gather(self, mine: bytes) -> list[bytes]:
        here = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        found = [torch.empty_like(here) for _ in range(distributed.get_world_size())]
        distributed.all_gather(found, here, group=self._group)
        return [one.numpy().tobytes() for one in found]

    def _match(self, parts: Sequence[ReplicaPart], table: Sequence[npt.NDArray[np.int64]]) -> list[tuple[int, ...]]:
        ranks, mains = defaultdict[tuple[int, int], set[int]](set), defaultdict[tuple[int, int], list[int]](list)
        forms, problem = dict[int, tuple[int, int]](), None
        for rank, rows in enumerate(table):
            for name, form, box, main in rows.tolist():
                first, known = forms.setdefault(name, (rank, form))
                if known != form:
                    problem = problem or (first, rank, name, "have tensors of different shapes or dtypes under this name")
                ranks[name, box].add(rank)
                if main:
                    mains[name, box].append(rank)
        for (name, _), claiming in mains.items():
            if len(claiming) > 1 and problem is None:
                problem = claiming[0], claiming[1], name, "both store the same part: the name is local to a pipeline stage"
        if problem is not None:
            first, second, name, what = problem
            mine = next((part.name for part in parts if _number(part.name) == name), "")
            names = [""] * len(table)
            distributed.all_gather_object(names, mine, group=self._group)
            remedy = "give each stage's tensors names of the whole model, as sharded_state_dict of Megatron's modules does"
            raise StateError(f"ranks {first} and {second} {what}", subject=max(names), remedy=remedy)
        found = []
        for part in parts:
            key = _number(part.name), _number(part.box)
            found.append(tuple(sorted(ranks[key])) if mains[key] else ())
        return found

    def _raise(self, failure: Exception | None, rank: int) -> None:
        texts: list[str] = [""] * distributed.get_world_size()
        distributed.all_gather_object(texts, "" if failure is None else repr(failure), group=self._group)
        if failure is not None:
            raise failure
        raise StateError(f"rank {rank} cannot save: {texts[rank]}", subject="the state")


def _row(part: ReplicaPart) -> tuple[int, int, int, bool]:
    return _number(part.name), _number(part.form), _number(part.box), part.main


def _number(text: str) -> int:
    return int.from_bytes(stored_digest(text.encode())[:8], "little")


def _digest(content: bytes) -> bytes:
    return stored_digest(content)[:16]
