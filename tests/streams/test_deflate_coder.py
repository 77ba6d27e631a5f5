"""The Deflate coder without a GPU: in Triton's interpreter it writes what zlib reads, and Triton's compiler takes it."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib

import pytest
import torch
from device import SEEDS
from plane_streams import STREAM, cases, check_sizes

from raystow.workers.gpu.kernels.deflate_kernels import Deflate

assert SEEDS, "importing it puts Triton into its interpreter, or skips this"

TRIED = (
    *("exponents", "exponents, fewer", "zeros", "hardly anything but zeros", "zeros in rows", "one of each among zeros"),
    *("runs of 5 zeros", "runs of 257 zeros", "five zeros"),
)


def test_what_is_coded_is_read_by_zlib() -> None:
    coder, given = Deflate("deflate", STREAM), {name: stream for name, stream in cases().items() if name in TRIED}
    n = len(given)
    assert n == len(TRIED)
    sizes = torch.tensor([len(stream) for stream in given.values()])
    out = torch.full((n, coder.stride), 0xAB, dtype=torch.uint8)
    sources = torch.tensor([stream.data_ptr() for stream in given.values()])
    targets, coded = out.data_ptr() + torch.arange(n) * coder.stride, torch.zeros(n, dtype=torch.int64)
    scratch = torch.empty(coder.coding_scratch(n), dtype=torch.uint8)
    coder.compress(sources, sizes, targets, coded, scratch=scratch, status=torch.ones(n, dtype=torch.int32))
    for (what, stream), row, size in zip(given.items(), out, coded.tolist(), strict=True):
        assert zlib.decompress(row[:size].numpy().tobytes(), wbits=-15) == stream.numpy().tobytes(), what
    check_sizes(dict(zip(given, coded.tolist(), strict=True)))


COMPILING = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from raystow.workers.gpu.kernels.deflate_kernels import Deflate, deflate

constants = {**Deflate("deflate", 16 << 10).constants, "RUNS": sys.argv[1] == "True"}
pointers = dict.fromkeys(("sources", "sizes", "targets", "coded"), "*i64") | {"tables": "*i32"}
signature = pointers | dict.fromkeys(("head_low", "head_high"), "i64") | dict.fromkeys(constants, "constexpr")
values = {(list(signature).index(name),): value for name, value in constants.items()}
print(len(compile(ASTSource(deflate, signature, values), GPUTarget("cuda", 90, 32), {"num_warps": 2}).asm["cubin"]))
"""


@pytest.mark.parametrize("runs", [False, True])
def test_the_compiler_takes_it_for_a_gpu_that_is_not_there(runs: bool) -> None:
    """What the interpreter lets pass, such as a name that changes its type, is told here and not on a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", COMPILING, str(runs)]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr[-2000:]
    assert int(told.stdout) > 10_000
