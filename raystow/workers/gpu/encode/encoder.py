"""Encodes chunks on the GPU where they are, and copies the result to host memory, while the training goes on.

Many chunks at a time go through these stages, each on its own CUDA stream:

1. *read*: a kernel splits the words into byte planes and computes the digest. From then on the training may change the tensor.
2. *copy* the planes that are stored raw to pinned host memory.
3. *code* the other planes, of most chunks only the highest. Coders are faster with more streams, so planes of several batches
   are coded by one call. The coded streams are concatenated in device memory, and stay there until all chunks have been read: the
   link to the host has a fiftieth of the bandwidth of GPU memory, and everything that is copied before ``fence`` delays it.
4. *copy* the coded planes to host memory.

Meanwhile, the digests of the stored bytes are computed: see ``stored_hasher``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ....storage.errors import ClusterError
from ..encode_request import EncodeRequest, Source
from ..kernels.deflate_kernels import coder
from ..uploads import Uploads
from .batch_results import BatchResults
from .device_memory import SIZE, EncoderMemory, EncoderResources, EncoderStreams
from .encode_plan import EncodePlan
from .encode_run import Emit, EncodeRun
from .hash_plan import HashPlan
from .pinned_ring import PinnedRing


class Encoder:
    """Encodes chunks of one device, save after save.

    Args:
        device: The GPU.
        codec: The codec of planes; None to store all chunks raw.
        ring: Receives the encoded chunks.
        size: Bytes of device memory to allocate.
        priority: CUDA priority of coding; the training has 0, and lower numbers go first.
        uploads: Copies chunks in host memory to the device.
    """

    def __init__(
        self,
        device: torch.device,
        codec: str | None,
        ring: PinnedRing,
        *,
        size: int = SIZE,
        priority: int = 0,
        uploads: Uploads | None = None,
    ) -> None:
        self._device = device
        with torch.cuda.device(device):
            streams, found = EncoderStreams(device, priority), coder(codec) if codec else None
            try:
                memory = EncoderMemory(device, found, size, ring.capacity)
            except torch.OutOfMemoryError as error:
                what = f"raystow needs {size >> 20} MiB of device memory to encode: {error}"
                remedy = 'leave as much free, or save with Compression("cpu")'
                raise ClusterError(what, subject=str(device), remedy=remedy) from error
            self._resources = EncoderResources(found, memory, streams, ring, uploads or Uploads(device))
            torch.cuda.current_stream(device).synchronize()
        self.plan: EncodePlan | None = None
        """The plan of the last request."""
        self._hashing: HashPlan | None = None
        self.digests: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        """``raw_digest``, before ``finish``, of the chunks of the last request, in their order."""
        self.run: EncodeRun | None = None
        """The current request, while ``encode`` runs."""

    @property
    def results(self) -> BatchResults:
        """The results of the current request, while ``encode`` runs."""
        assert self.run is not None
        return self.run.reader.results

    def close(self) -> None:
        """Free the device memory."""
        torch.cuda.synchronize(self._device)
        self.plan = self._hashing = None
        del self._resources

    def prepare(self, sources: Sequence[Source]) -> None:
        """Plan the encoding of these chunks."""
        with torch.cuda.device(self._device):
            self._plans_for(sources)

    def encode(self, request: EncodeRequest, emit: Emit) -> None:
        """Encode all chunks of a request. Raises ``SaveFailed`` naming a tensor that was changed too early."""
        with torch.cuda.device(self._device):
            try:
                self.run = EncodeRun(*self._plans_for(request.pieces), request, self._resources, emit)
                self.run.run()
                self.digests = self.results.digests()
            except BaseException:
                torch.cuda.synchronize(self._device)
                raise
            finally:
                self._resources.memory.dense.clear()
                self._resources.memory.pack_buffers.reset()
                if self.run is not None:
                    self.run.close()
                self.run = None

    def _plans_for(self, sources: Sequence[Source]) -> tuple[EncodePlan, HashPlan]:
        """Return the last plans if they are valid for these chunks, else make plans."""
        if self.plan is None or self._hashing is None or not self.plan.fits(sources):
            self.plan = self._hashing = None
            memory = self._resources.memory
            self.plan = EncodePlan(sources, memory.limits, low_planes=memory.low_planes, high_planes=memory.high_planes)
            self._hashing = HashPlan(self.plan, values=memory.values, tree=memory.tree)
            torch.cuda.current_stream(self._device).synchronize()  # their tables are on the device
        return self.plan, self._hashing
