"""Kernels are not compiled anew for other addresses and numbers, which would hold up the save that meets them first."""

from __future__ import annotations

import os
import subprocess
import sys

from device import SEEDS

assert SEEDS, "importing it puts Triton into its interpreter, or skips this"

ASKING = r"""
import inspect
import re
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature
from raystow.workers.gpu.kernels import blake3_kernels, copy_kernels, deflate_kernels, word_kernels

launched = []
for module in (deflate_kernels, word_kernels, copy_kernels, blake3_kernels):
    names = set(re.findall(r"^ +(\w+)\[", inspect.getsource(module), re.M))  # as in name[grid](...)
    launched += [one for name, one in vars(module).items() if name in names and isinstance(one, JITFunction)]
ALWAYS_ALIGNED = {"keys", "block_keys", "picked", "values", "tables", "head_low", "head_high"}
NUMBERS = {"n", "base", "streams", "times", "out", "head_low", "head_high"}
memory = torch.zeros(8, dtype=torch.int64)
for kernel in launched:
    bind = create_function_from_signature(kernel.signature, kernel.params, CUDABackend(GPUTarget("cuda", 90, 32)))
    found = set()
    for shift in (0, 1):
        constants, given = {p.name for p in kernel.params if p.is_constexpr}, {}
        for p in kernel.params:
            moved = 0 if p.name in ALWAYS_ALIGNED else shift
            given[p.name] = 3 if p.name in constants else 16 + moved if p.name in NUMBERS else memory[moved:]
        found.add(str(bind(**given)[1]))
    assert len(found) == 1, (kernel.__name__, found)
print(*sorted(kernel.__name__ for kernel in launched))
"""


def test_kernels_ask_nothing_of_addresses_and_numbers() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", ASKING]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr[-2000:]
    assert {"_pass", "_tell", "_choose", "deflate", "_leaves"} <= set(told.stdout.split()), "those that are launched are found"
