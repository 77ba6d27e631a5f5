"""Which codec a GPU's tensors are coded with: ``auto`` measures the device and its link to the host, once, and compares them with
what the store has taken so far.

- ``deflate``: plain Deflate streams; any machine reads them. What ``auto`` takes where the link is the narrow place, as it is
  wherever a GPU of this decade meets PCIe.
- ``zstd``: plain Zstandard frames. nvCOMP codes them at a tenth of Deflate's speed and larger; only decoding on a GPU is faster.
- ``ans``: several times as fast again, and decoded by nvCOMP on a GPU alone: for copies that are not the only ones. ``auto``
  never takes it.
- ``raw``: as they are. What ``auto`` takes where coding costs more time than it saves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...storage.coding.chunk import ANS, DEFLATE, RAW
from .nvcomp import STREAM, version

logger = logging.getLogger(__name__)

_SAMPLE = 32 << 20  # bytes
_GAIN = 0.16  # part of a mixed-precision state that coding saves (docs/performance.md)
_PLANES = 0.29  # part of such a state that is exponents


@dataclass(frozen=True)
class Choice:
    """``codec``: one of nvCOMP's or ``raw``. ``why``: a sentence for whoever looks at the version later."""

    codec: str
    why: str


def choose(codec: str, device: torch.device, store: float) -> Choice:
    """The codec that was asked for, or with ``auto`` the one by which a state gets to the store sooner. ``store``: bytes per
    second that it takes, 0 if that is not known yet."""
    if codec == RAW:
        return Choice(RAW, "asked for")
    if codec == ANS:
        logger.warning("ans: what is saved now can be read by nvCOMP %s on a GPU only; keep another copy", version())
    if codec != "auto":
        return Choice(codec, f"asked for; nvCOMP {version()}")
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        found = sooner(coding=_coding_rate(device), link=_link_rate(device), store=store / 1e9)
    return Choice(found.codec, f"{torch.cuda.get_device_name(device)}: {found.why}; nvCOMP {version()}")


def sooner(*, coding: float, link: float, store: float) -> Choice:
    """``deflate`` or ``raw``. All in GB/s: ``coding`` of exponent planes, ``link`` to the host, ``store`` (0: not known)."""
    way = min(link, store) if store else link
    coded = max((1 - _GAIN) / way, _PLANES / coding)  # seconds for a GB of state: coding, copying and storing go on at once
    said = f"the store takes {store:.1f}" if store else "what the store takes is not known yet"
    why = (
        f"it codes {coding:.0f} GB/s of exponents, its link carries {link:.0f}, {said}: "
        f"a GB of state takes {1e3 * coded:.0f} ms with deflate and {1e3 / way:.0f} ms without"
    )
    return Choice(DEFLATE if coded < 1 / way else RAW, why)


def _coding_rate(device: torch.device) -> float:
    """GB/s of exponent planes, about as weights have them."""
    from .kernels.deflate_kernels import coder  # needs Triton, which comes with torch where there are GPUs

    stream = STREAM[DEFLATE]
    codec = coder(DEFLATE, stream)
    plane = torch.randint(116, 124, (_SAMPLE,), dtype=torch.uint8, device=device)  # three bits a byte, as exponents have
    n = _SAMPLE // stream
    numbers = torch.arange(n, device=device)
    out = torch.empty(n * codec.stride, dtype=torch.uint8, device=device)
    sources, targets = plane.data_ptr() + numbers * stream, out.data_ptr() + numbers * codec.stride
    sizes, coded = torch.full((n,), stream, device=device), torch.empty(n, dtype=torch.int64, device=device)
    status = torch.empty(n, dtype=torch.int32, device=device)
    scratch = torch.empty(codec.coding_scratch(n), dtype=torch.uint8, device=device)
    return _rate(_SAMPLE, lambda: codec.compress(sources, sizes, targets, coded, scratch=scratch, status=status))


def _link_rate(device: torch.device) -> float:
    """GB/s from the device to pinned host memory."""
    source = torch.empty(_SAMPLE, dtype=torch.uint8, device=device)
    target = torch.empty(_SAMPLE, dtype=torch.uint8, pin_memory=True)
    return _rate(_SAMPLE, lambda: target.copy_(source, non_blocking=True))


def _rate(nbytes: int, work: Callable[[], object]) -> float:
    """GB/s of the fastest of three runs: the slower ones had to share the device."""
    times = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(nbytes / 1e6 / min(times))
