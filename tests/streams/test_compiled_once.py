"""Kernels are not compiled anew for other addresses and numbers, which would hold up the save that meets them first."""

from __future__ import annotations

import os
import subprocess
import sys

from device import SEEDS

assert SEEDS, "importing it puts Triton into its interpreter, or skips this"

ASKING = """
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature
from raystow.workers.cuda import huffman, kernels, moving
from raystow.workers.cuda.decoding import blake3

LAUNCHED = (
    *(kernels._pass, kernels._pick, kernels._compare, huffman.deflate, blake3._leaves, blake3._tree),
    *(moving._move, moving._tell, moving._choose, moving._line_up, moving._pack7, moving._unpack7),
)
ALWAYS_ALIGNED = {"keys", "block_keys", "picked", "values", "tables", "head_low", "head_high"}
NUMBERS = {"n", "base", "streams", "times", "out", "head_low", "head_high"}
memory = torch.zeros(8, dtype=torch.int64)
for kernel in LAUNCHED:
    bind = create_function_from_signature(kernel.signature, kernel.params, CUDABackend(GPUTarget("cuda", 90, 32)))
    found = set()
    for shift in (0, 1):
        constants, given = {p.name for p in kernel.params if p.is_constexpr}, {}
        for p in kernel.params:
            moved = 0 if p.name in ALWAYS_ALIGNED else shift
            given[p.name] = 3 if p.name in constants else 16 + moved if p.name in NUMBERS else memory[moved:]
        found.add(str(bind(**given)[1]))
    assert len(found) == 1, (kernel.__name__, found)
kernels_of_ours = [one for module in (huffman, kernels, moving, blake3) for one in vars(module).values()]
print(len(LAUNCHED), sum(isinstance(one, JITFunction) and bool(one.do_not_specialize) for one in kernels_of_ours))
"""


def test_kernels_ask_nothing_of_addresses_and_numbers() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", ASKING]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr[-2000:]
    launched, unspecialized = told.stdout.split()
    assert launched == unspecialized
