"""The errors of raystow within those of ``torch.distributed.checkpoint``."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from raystow.dcp import Reader


def failure(into: dict[str, Any], reader: Reader) -> BaseException:
    """Return the error of a load in this process alone."""
    with pytest.raises(dcp.api.CheckpointException) as error:
        dcp.load(into, storage_reader=reader, no_dist=True)
    return error.value.failures[0][0]
