"""Imported once by the process from which ranks are forked, with what torch imports when it is first used."""

import contextlib

import layouts  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

import raystow.dcp  # noqa: F401

with contextlib.suppress(ImportError):  # where it is installed
    import deepspeed  # noqa: F401
