"""Modules that the fork server imports once, including those that torch imports on first use."""

import contextlib

import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

import raystow.dcp  # noqa: F401
from integration import layouts  # noqa: F401

with contextlib.suppress(ImportError):  # DeepSpeed is optional
    import deepspeed  # noqa: F401
