"""Encodes captured steps into entries, in one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from ...state import value_text
from ...storage.errors import StateError
from ...storage.format.boxes import Box
from ...workers.journal.entry_writer import EntryWriter
from ...workers.protocol.messages import EntryHeader, EntryInfo, OptimizerStep, RecordedTensor
from . import entry_file
from .gradient_coding import TensorEncoder
from .state_digests import StateDigests
from .step_hooks import StepInputs

if TYPE_CHECKING:
    from .gpu_gradients import GpuGradientEncoder, SharedRing


@dataclass
class CapturedEntry:
    """All that belongs to one step of the training. ``before``: digests of the state that the entry starts from, if they are
    recorded. ``fresh``: all hyper-parameters are recorded, and not only those that have changed. ``layout``: this rank's parts
    of the parameters, in the first entry."""

    steps: list[StepInputs] = field(default_factory=list)
    before: StateDigests | None = None
    after: StateDigests | None = None
    whole: bool = False
    groups: list[list[dict[str, object]]] = field(default_factory=list)
    values: str = ""
    module_values: str = ""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    fresh: bool = True
    layout: tuple[Box, ...] = ()
    ready: dict[int, torch.cuda.Event] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """The most bytes that the entry can have."""
        tensors = [gradient for step in self.steps for gradient in step.gradients if gradient is not None]
        nbytes: int = sum(one.numel() * one.itemsize for one in (*tensors, *self.buffers.values()))
        return entry_file.OVERHEAD + nbytes

    def mark_ready(self) -> None:
        """Note that all of it has been launched on the current streams; ``ready`` gets an event for each GPU."""
        tensors = [gradient for step in self.steps for gradient in step.gradients if gradient is not None]
        tensors += self.buffers.values()
        values = [value for step in self.steps for value in step.scale.values()]
        values += [
            value for groups in (*(step.groups for step in self.steps), *self.groups) for one in groups for value in one.values()
        ]
        tensors += [value for value in values if isinstance(value, torch.Tensor)]
        for device in {tensor.device.index for tensor in tensors if tensor.device.type == "cuda"}:
            self.ready[device] = torch.cuda.current_stream(device).record_event()


class EntryEncoder:
    """``encode`` is called by one thread. Digests of headers chain the entries. ``of_device``: makes the encoder of a GPU."""

    def __init__(self, of_device: Callable[[int, SharedRing], GpuGradientEncoder] | None = None) -> None:
        self._of_device = of_device or _gpu_encoder
        self._host = TensorEncoder()
        self._ring: SharedRing | None = None
        self._devices: dict[int, GpuGradientEncoder] = {}
        self._groups: dict[tuple[int, int], str] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self.parent = b""

    def encode(
        self, captured: CapturedEntry, info: EntryInfo, sink: EntryWriter, on_read: Callable[[], None] = lambda: None
    ) -> EntryInfo:
        """Add all bytes of an entry to ``sink``; return its description. ``on_read``: called when the captured tensors may be
        overwritten."""
        for event in captured.ready.values():  # small tensors are read on streams of this thread
            event.synchronize()
        if captured.fresh:
            self._groups.clear()
            self._buffers.clear()
        buffers = self._changed_buffers(captured)
        gradients = [gradient for step in captured.steps for gradient in step.gradients]
        recorded = self._encode(gradients, captured.ready, sink, on_read)
        # A GPU's encoder would overwrite buffers.
        recorded += [self._host.encode(buffer.cpu(), sink.copy) for _, buffer in buffers]
        records = iter(recorded)
        steps = tuple(
            OptimizerStep(
                step.optimizer,
                self._changed(step.optimizer, step.groups),
                tuple(next(records) for _ in step.gradients),
                value_text.dumps(step.scale) if step.scale else "",
            )
            for step in captured.steps
        )
        header = EntryHeader(
            info=info,
            parent=self.parent,
            steps=steps,
            groups=tuple(self._changed(number, groups) for number, groups in enumerate(captured.groups)),
            values=captured.values,
            module_values=captured.module_values,
            buffers=tuple((name, next(records)) for name, _ in buffers),
            before=captured.before.packed() if captured.before is not None else b"",
            after=captured.after.packed() if captured.after is not None else b"",
            whole=captured.whole,
            layout=captured.layout,
        )
        end, self.parent = entry_file.end_of(header)
        return replace(info, size=sink.copy(end) + end.size)

    def close(self) -> None:
        """Free the memory of the devices' encoders."""
        for encoder in self._devices.values():
            encoder.close()
        self._devices.clear()
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def _encode(
        self,
        tensors: Sequence[torch.Tensor | None],
        ready: Mapping[int, torch.cuda.Event],
        sink: EntryWriter,
        on_read: Callable[[], None],
    ) -> list[RecordedTensor]:
        found: list[RecordedTensor | None] = [None] * len(tensors)
        devices = dict[int, list[int]]()
        for place, tensor in enumerate(tensors):
            if tensor is not None and tensor.device.index in ready:
                devices.setdefault(tensor.device.index, []).append(place)
            else:
                found[place] = self._host.encode(None if tensor is None else tensor.cpu(), sink.copy)
        if not devices:
            on_read()
        unread = len(devices)

        def read() -> None:
            nonlocal unread
            unread -= 1
            if not unread:
                on_read()

        for device, places in devices.items():
            here = [tensor for place in places if (tensor := tensors[place]) is not None]
            for place, one in zip(places, self._encoder(device, sink).encode(here, ready[device], sink, read), strict=True):
                found[place] = one
        return [one for one in found if one is not None]

    def _encoder(self, device: int, sink: EntryWriter) -> GpuGradientEncoder:
        from .gpu_gradients import SharedRing

        if self._ring is None:
            self._ring = SharedRing(sink.ring)
        if device not in self._devices:
            self._devices[device] = self._of_device(device, self._ring)
        return self._devices[device]

    def _changed_buffers(self, captured: CapturedEntry) -> list[tuple[str, torch.Tensor]]:
        """The buffers that are not those of the entry before; their version counters do not tell, as batch norm ignores them."""
        before, self._buffers = self._buffers, captured.buffers
        return [(name, buffer) for name, buffer in captured.buffers.items() if not _same(buffer, before.get(name))]

    def _changed(self, optimizer: int, groups: Sequence[Mapping[str, object]]) -> tuple[str, ...]:
        """The texts of groups' hyper-parameters; empty for those that are as they were recorded last."""
        found = []
        for number, group in enumerate(groups):
            text = value_text.dumps(recordable(group), what=f"group {number}")
            found.append("" if self._groups.get((optimizer, number)) == text else text)
            self._groups[optimizer, number] = text
        return tuple(found)


def _gpu_encoder(device: int, ring: SharedRing) -> GpuGradientEncoder:
    from .gpu_gradients import GpuGradientEncoder

    return GpuGradientEncoder(torch.device("cuda", device), ring)


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether two tensors are alike, bit for bit."""
    if other is None or other.shape != one.shape or other.dtype != one.dtype:
        return False
    return bool(torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)))


def recordable(group: Mapping[str, object]) -> dict[str, object]:
    """The hyper-parameters that are values. Functions and other objects stay as the training has made them."""
    found = {}
    for name, value in group.items():
        try:
            value_text.dumps(value)
        except StateError:
            continue
        found[name] = value
    return found
