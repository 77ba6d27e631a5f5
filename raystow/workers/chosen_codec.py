"""The codec that was chosen for the tensors of a save."""

from __future__ import annotations

from dataclasses import dataclass

GAIN = 0.16
"""The fraction of a mixed-precision state that coding saves (docs/performance.md)."""


@dataclass(frozen=True)
class ChosenCodec:
    """``codec``: its name or ``raw``. ``why``: the reason, which is stored with the version."""

    codec: str
    why: str
