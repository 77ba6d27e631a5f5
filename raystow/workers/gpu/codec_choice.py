"""Selects the codec of tensors on a GPU. ``auto`` measures the device and its link to the host, once, and considers the measured
throughput of the store.

- ``deflate``: plain Deflate streams, which any machine decodes. ``auto`` selects it if the link is slow compared to the coder,
  which is true of all current GPUs on PCIe.
- ``zstd``: plain Zstandard frames. Coding is ten times slower than with Deflate, and the result is larger; decoding on a GPU is
  faster.
- ``ans``: several times faster than Deflate, but only nvCOMP on a GPU decodes it: for versions that have another copy. ``auto``
  never selects it.
- ``raw``: no coding. ``auto`` selects it if coding takes more time than it saves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ...storage.coding.chunk import ANS, DEFLATE, RAW
from ..chosen_codec import GAIN, ChosenCodec
from .kernels.deflate_kernels import coder
from .nvcomp import STREAM, version

logger = logging.getLogger(__name__)

_SAMPLE = 32 << 20  # bytes
_PLANES = 0.29  # the fraction of such a state that is exponents


def choose(codec: str, device: torch.device, store: float) -> ChosenCodec:
    """Return the requested codec, or for ``auto`` the one with which a state is stored sooner. ``store``: the store's throughput
    in bytes per second, 0 if it is unknown."""
    if codec == RAW:
        return ChosenCodec(RAW, "asked for")
    if codec == ANS:
        logger.warning("ans: what is saved now can be read by nvCOMP %s on a GPU only; keep another copy", version())
    if codec != "auto":
        return ChosenCodec(codec, f"asked for; nvCOMP {version()}")
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        found = sooner(coding=_coding_rate(device), link=_link_rate(device), store=store / 1e9)
    return ChosenCodec(found.codec, f"{torch.cuda.get_device_name(device)}: {found.why}; nvCOMP {version()}")


def sooner(*, coding: float, link: float, store: float) -> ChosenCodec:
    """Return ``deflate`` or ``raw``. All in GB/s: ``coding`` of exponent planes, ``link`` to the host, ``store`` (0: unknown)."""
    way = min(link, store) if store else link
    coded = max((1 - GAIN) / way, _PLANES / coding)  # seconds for a GB of state: coding, copying and storing overlap
    said = f"the store takes {store:.1f}" if store else "what the store takes is not known yet"
    why = (
        f"it codes {coding:.0f} GB/s of exponents, its link carries {link:.0f}, {said}: "
        f"a GB of state takes {1e3 * coded:.0f} ms with deflate and {1e3 / way:.0f} ms without"
    )
    return ChosenCodec(DEFLATE if coded < 1 / way else RAW, why)


def _coding_rate(device: torch.device) -> float:
    """Measure the coding of planes like exponents of weights, in GB/s."""
    stream = STREAM[DEFLATE]
    codec = coder(DEFLATE)
    own = torch.Generator(device).manual_seed(0)  # the default one is that of the training
    # three bits per byte, as in exponents
    plane = torch.randint(116, 124, (_SAMPLE,), dtype=torch.uint8, device=device, generator=own)
    n = _SAMPLE // stream
    numbers = torch.arange(n, device=device)
    out = torch.empty(n * codec.stride, dtype=torch.uint8, device=device)
    sources, targets = plane.data_ptr() + numbers * stream, out.data_ptr() + numbers * codec.stride
    sizes, coded = torch.full((n,), stream, device=device), torch.empty(n, dtype=torch.int64, device=device)
    status = torch.empty(n, dtype=torch.int32, device=device)
    scratch = torch.empty(codec.coding_scratch(n), dtype=torch.uint8, device=device)
    return _rate(_SAMPLE, lambda: codec.compress(sources, sizes, targets, coded, scratch=scratch, status=status))


def _link_rate(device: torch.device) -> float:
    """Measure copies from the device to pinned host memory, in GB/s."""
    source = torch.empty(_SAMPLE, dtype=torch.uint8, device=device)
    target = torch.empty(_SAMPLE, dtype=torch.uint8, pin_memory=True)
    return _rate(_SAMPLE, lambda: target.copy_(source, non_blocking=True))


def _rate(nbytes: int, work: Callable[[], object]) -> float:
    """Return the GB/s of the fastest of three runs, since slower ones shared the device with other work."""
    times = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(nbytes / 1e6 / min(times))
