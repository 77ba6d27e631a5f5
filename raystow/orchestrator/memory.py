"""How much host memory saving takes, where nobody says."""

from __future__ import annotations

_DEFAULT = 1 << 30
_SLACK = 256 << 20


def share_of_memory(nbytes: int, *, gpus: int, machine: int) -> int:
    """Bytes for a rank that stores ``nbytes`` from GPUs, one of ``gpus`` ranks on a machine of ``machine`` bytes: enough for a
    whole save, so that staging does not wait for uploads, but no more than its part of half the machine. A GiB where there are no
    GPUs: what lies in host memory holds up nothing dearer than itself."""
    if not gpus:
        return _DEFAULT
    return max(_DEFAULT, min(nbytes * 8 // 7 + _SLACK, machine // 2 // gpus))
