"""What the GPU encoders are given: chunks, and the request to encode those of one device. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ...state.chunk_info import ChunkInfo
from ...storage.coding.dtypes import DType
from ...storage.errors import SaveFailed

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


class Source(Protocol):
    """A chunk of a tensor in the memory of the device or of the host."""

    @property
    def name(self) -> str:
        """The tensor's name."""

    @property
    def dtype(self) -> DType:
        """The type of its words."""

    @property
    def nbytes(self) -> int:
        """Bytes: a whole number of words."""

    @property
    def origin(self) -> int | None:
        """The device address of its words before rounding; None if they are not contiguous."""

    @property
    def address(self) -> int | None:
        """The device address of the words to store; None if they must be gathered first."""

    @property
    def planes(self) -> tuple[int, ...]:
        """Numbers of the byte planes that are worth coding, ascending; the last one is the highest plane."""

    @property
    def identity(self) -> object:
        """Equal for chunks with the same description."""

    def describe(self) -> ChunkInfo:
        """Return the fields of its manifest row that are known before coding."""

    @property
    def on_host(self) -> bool:
        """Whether its words are in host memory. They have no address, then."""

    def host_words(self) -> npt.NDArray[np.void]:
        """Return its words in host memory."""

    def gather(self, uploaded: torch.Tensor | None = None) -> torch.Tensor:
        """Return a contiguous copy of the words, made on the current stream. ``uploaded``: a copy of the words in host memory."""


class DeviceSource:
    """The part of a ``Source`` that all contiguous chunks in device memory have."""

    on_host = False

    def host_words(self) -> npt.NDArray[np.void]:
        """Never called."""
        raise AssertionError("the chunk is in device memory")

    def gather(self, uploaded: torch.Tensor | None = None) -> torch.Tensor:
        """Never called."""
        raise AssertionError("the chunk is contiguous")


@dataclass(frozen=True)
class EncodeRequest:
    """The chunks of one device to encode in one save.

    Args:
        pieces: The chunks. An encoder reuses its plan if they are the same as in the last request.
        after: The CUDA event after which the chunks may be read.
        on_read: Called when all chunks have been read: from then on the training may change them.
        urgent: Returns whether the training waits for ``on_read``. Reading then gets the highest stream priority.
        meanwhile: Called once, when the GPU has as much work as fits into the encoder's memory.
        uploaded: Called with chunks in host memory and their words, uint8 on the current stream of the device, before they are
            rounded in place.
    """

    pieces: Sequence[Source]
    after: torch.cuda.Event
    on_read: Callable[[], None]
    urgent: Callable[[], bool] = lambda: False
    meanwhile: Callable[[], None] = lambda: None
    uploaded: Callable[[Sequence[Source], Sequence[torch.Tensor]], None] = lambda sources, words: None


class EncodingRefused(Exception):
    """The node worker cannot encode on a device; nothing has been lent to it yet, so the training process can encode instead."""


def changed_too_early(name: str) -> SaveFailed:
    """Return the error for a tensor that the training changed before it was read."""
    remedy = "call fence() before anything changes it, or guard(optimizer)"
    return SaveFailed("the tensor changed while it was being saved", subject=name, remedy=remedy)
