"""The default of ``Memory.staging``."""

from __future__ import annotations

_DEFAULT = 1 << 30
_SLACK = 256 << 20


def share_of_memory(nbytes: int, *, gpus: int, machine: int) -> int:
    """Bytes for a rank that stores ``nbytes`` from GPUs, one of ``gpus`` ranks on a machine with ``machine`` bytes of memory.

    Enough for one whole save, so that staging does not wait for uploads, but at most this rank's share of half the machine. 1 GiB
    without GPUs.
    """
    if not gpus:
        return _DEFAULT
    return max(_DEFAULT, min(nbytes * 8 // 7 + _SLACK, machine // 2 // gpus))
