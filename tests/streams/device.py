"""Simulated CUDA streams on the CPU: enqueued work runs when the host waits for it, or at a random earlier time.

Kernels run in Triton's interpreter, on tensors in host memory. The next stream is drawn at random, and most work runs only when
the host waits for it: code that reads a result without waiting does not find the result. The commands of the host to a device are
so tested without a GPU, and in more orders than a GPU would execute.

Needs Triton, and ``SEEDS`` in the environment (``make test-streams``). On a machine with a GPU, modules that import this one are
skipped.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.replaced_parts import replace_parts
from torch.overrides import TorchFunctionMode

if torch.cuda.is_available():
    pytest.skip("this machine has a GPU: run tests/gpu", allow_module_level=True)
if "SEEDS" not in os.environ:
    pytest.skip("takes minutes: make test-streams", allow_module_level=True)

os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is loaded

from triton import language as tl
from triton.runtime.interpreter import TensorHandle

from raystow.storage.coding.digest import BLOCK
from raystow.workers.gpu.encode import pinned_ring
from raystow.workers.gpu.kernels import library, word_kernels
from raystow.workers.gpu.kernels.library import Architecture, Kernel, variant_name

SEEDS = range(int(os.environ["SEEDS"]))
"""Seeds of each test; each seed gives another order of execution."""

_STEPS = (0, 0, 1, 3)  # numbers of work items that run during a query of an event, drawn at random

_STREAMS = 16  # that have different ranks

_HOST_CALLS = {
    *("__getitem__", "__iter__", "__len__", "data_ptr", "element_size", "is_contiguous", "numel", "numpy", "split"),
    *("tolist", "view"),
}
"""Calls that read a tensor's address or host memory: the host executes them without the device."""

_NEW_MEMORY = {"arange", "empty", "from_numpy", "ones", "zeros", "zeros_like"}
"""Calls that return new memory: no earlier work can use it, so they do not wait."""


class Event:
    """A point in a stream."""

    def __init__(self, device: Device) -> None:
        self._device, self.passed, self._times = device, False, 0

    def query(self) -> bool:
        """Return whether the event has passed."""
        self._device.go_on()
        return self.passed

    def synchronize(self) -> None:
        self._device.run_until(lambda: self.passed)

    def record(self, stream: Stream) -> None:
        """Move the event to the end of a stream."""
        self.passed, self._times = False, self._times + 1
        stream.queue.append(functools.partial(self._pass, self._times))

    def _pass(self, times: int) -> None:
        self.passed = times == self._times


class Stream:
    """A queue of work and of events to wait for, in the order of their submission."""

    def __init__(self, device: Device) -> None:
        self._device, self.queue = device, deque[Callable[[], Any] | Event]()
        device.streams.append(self)

    def record_event(self) -> Event:
        event = Event(self._device)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.queue.append(event)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self._device.run_until(lambda: not self.queue)


class Device:
    """A device whose order of execution is drawn from ``seed``.

    An even seed draws each next stream. An odd one draws a rank for each stream, and the streams of the last ranks work only when
    all others wait: so work that is hardly ever late is late too (Burckhardt et al. 2010, probabilistic concurrency testing).
    """

    def __init__(self, seed: int) -> None:
        self._random, self.streams = np.random.default_rng(seed), list[Stream]()
        self._ranks = list(self._random.permutation(_STREAMS)) if seed % 2 else []
        self._lock = threading.RLock()  # only one thread at a time runs work
        self.current = self.default = Stream(self)
        self.busy = False
        self.kept = list[Any]()
        """All tensors that were made: torch would reuse the memory of a freed tensor for later work on the same stream."""

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def enqueue(self, work: Callable[[], Any]) -> None:
        self.current.queue.append(work)

    def go_on(self) -> None:
        """Run a random number of enqueued work items, possibly none."""
        for _ in range(int(self._random.choice(_STEPS))):
            self._step()

    def run_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            assert self._step(), "deadlock: every stream waits for an event"

    def synchronize(self) -> None:
        self.run_until(lambda: not any(stream.queue for stream in self.streams))

    def _step(self) -> bool:
        with self._lock:
            return self._next()

    def _next(self) -> bool:
        ready = [stream for stream in self.streams if stream.queue and getattr(stream.queue[0], "passed", True)]
        if not ready:
            return False
        if self._ranks:
            stream = min(ready, key=lambda one: self._ranks[self.streams.index(one) % _STREAMS])
        else:
            stream = ready[self._random.integers(len(ready))]
        work = stream.queue.popleft()
        if not isinstance(work, Event):
            before, self.busy = self.busy, True
            try:
                work()
            finally:
                self.busy = before
        return True


class _Calls(TorchFunctionMode):
    """torch's functions as they behave for tensors on a device: non-blocking copies are enqueued; every other call first waits
    for the current stream."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = dict(kwargs or {})
        more.pop("pin_memory", None)
        later = more.pop("non_blocking", False)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if self._device.busy or func.__name__ in _HOST_CALLS or func.__name__ == "__get__":
            return func(*args, **more)
        if later:
            target, source = (torch.empty_like(args[0]), args[0]) if func is torch.Tensor.to else args
            self._device.enqueue(functools.partial(torch.Tensor.copy_, target, source))
            self._device.kept.append(target)
            return target
        if func.__name__ not in _NEW_MEMORY:
            self._device.current.synchronize()
        made = func(*args, **more)
        self._device.kept.append(made)
        return made


def _argument(kind: str, of: Any) -> Any:
    """Return an argument as the interpreter needs it: a tensor for one that has only an address and a dtype; an integer with the
    type that it has in the compiled kernel, since a small address is no pointer else."""
    if kind == "q":
        return tl.tensor(TensorHandle(np.array([of], np.int64), tl.int64), tl.int64)
    if isinstance(of, torch.Tensor) or not hasattr(of, "data_ptr"):
        return of
    first = (ctypes.c_uint8 * of.dtype.itemsize).from_address(of.data_ptr())
    return torch.from_numpy(np.ctypeslib.as_array(first)).view(of.dtype)


def interpret(kernel: Kernel, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run a kernel in Triton's interpreter, and check that a compiled variant exists for these arguments."""
    compiled = Architecture("sm_90").binary(variant_name(kernel.name, constants))
    assert len(compiled.arguments) == len(args), "the compiled kernel has another number of arguments"
    module, name = kernel.name.split(".")
    function = getattr(importlib.import_module(f"raystow.workers.gpu.kernels.sources.{module}"), name)
    one_block = {"GROUP": 1} if kernel.name == "words.transform" else {}  # digest blocks per program: test chunks have few
    function[grid](*map(_argument, compiled.arguments, args), **{**constants, **one_block})


@contextlib.contextmanager
def device(seed: int) -> Iterator[Device]:
    """Replace ``torch.cuda`` by a simulated device and enqueue kernels on that device."""
    made = Device(seed)

    def launch(kernel: Kernel, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        made.enqueue(functools.partial(interpret, kernel, grid, *args, **constants))

    def copy(*places: int) -> None:
        made.enqueue(lambda: ctypes.memmove(*places))

    with pytest.MonkeyPatch.context() as patch, _Calls(made):
        driver: list[tuple[object, str, object]] = [
            (Kernel, "launch", launch),
            (pinned_ring, "copy_to_host", copy),
            (library, "copy_to_host", copy),
            (library, "copy_to_device", copy),
            (library, "record", lambda event: event.record(made.current)),
            (word_kernels, "_REACH", 4 * BLOCK),
            (torch.cuda, "device", lambda where: contextlib.nullcontext()),
            (torch.cuda, "Stream", lambda where=None, priority=0: Stream(made)),
            (torch.cuda, "stream", made.on),
            (torch.cuda, "current_stream", lambda where=None: made.current),
            (torch.cuda, "synchronize", lambda where=None: made.synchronize()),
        ]
        replace_parts(patch, driver)
        yield made
