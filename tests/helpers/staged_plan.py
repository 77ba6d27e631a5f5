"""A plan of a save as the staging thread sees it: chunks of the host that need no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from helpers.processes import incarnation
from raystow.storage.coding.kernels import Bytes
from raystow.workers.protocol.messages import ChunkInfo, OpenSession, RankSaveRequest
from raystow.workers.shm.ring import SLOT

OPENING = OpenSession("memory://staging", "r", 0, 1, incarnation("i"), 1, 2 * SLOT, SLOT, 7)
INFO = ChunkInfo("w", "[]", "tensor", "uint8", (SLOT,), "weights", (0,), (SLOT,))
REQUEST = RankSaveRequest(0, 1, incarnation("i"), 1, 7, 60.0)


@dataclass
class Chunk:
    nbytes: int = SLOT
    device: None = None
    info: Any = INFO

    def describe(self) -> Any:
        return self.info

    def copy(self, out: Bytes) -> None:
        out[:] = 1


@dataclass
class Plan:
    pieces: list[Chunk]
    coverage: tuple[int, int] = (0, 0)
    owned_dtensors: tuple[str, ...] = ()
    plain_tensors: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()
    followers: tuple[Any, ...] = ()
    compared: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())
    made: tuple[float, float] = (0.0, 0.0)
    text: int = 0

    @property
    def parts(self) -> dict[None, Plan]:
        return {None: self}

    @property
    def chunks(self) -> int:
        return len(self.pieces) + len(self.followers)

    def find_derived(self) -> None: ...

    def changed(self) -> str:
        return ""

    def release(self) -> None: ...

    def rounded(self) -> dict[str, Any]:
        return {}

    ready: dict[int, Any] = field(default_factory=dict)
