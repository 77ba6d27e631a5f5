"""What a ``checkpoint_id`` of DCP means: a training step in one of four documented forms, else the name of a pin."""

from __future__ import annotations

import os
import re

from ...storage.errors import StateError
from ...storage.versions.version_selector import is_reserved

_STEP = re.compile(r"(?:step[-_]|checkpoint-)([0-9]{1,18})|epoch=[0-9]{1,18}-step=([0-9]{1,18})\.ckpt", re.ASCII)


def parse_id(checkpoint_id: str | os.PathLike[str]) -> int | str:
    """Return the step or the name in the last part of a ``checkpoint_id``. Raises ``StateError`` if it is neither."""
    last = os.fspath(checkpoint_id).rstrip("/").rpartition("/")[2] if not isinstance(checkpoint_id, int) else str(checkpoint_id)
    if match := _STEP.fullmatch(last):
        return int(match[1] or match[2])
    if not last or is_reserved(last):
        forms = "'step-7', 'step_7', 'checkpoint-7', 'epoch=1-step=7.ckpt', or a name that is not a number"
        raise StateError("is neither a step nor a name", subject=f"checkpoint_id {last!r}", remedy=f"pass {forms}")
    return last


def is_id(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether ``parse_id`` accepts it."""
    try:
        parse_id(checkpoint_id)
    except StateError:
        return False
    return True
