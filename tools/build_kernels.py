"""Compile the GPU kernels to raystow/workers/gpu/kernels/binaries: ``make kernels``. Needs no GPU.

It writes cubins for the architectures below, and PTX of the oldest one for newer architectures.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # otherwise the binaries contain paths of this machine

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from raystow.workers.gpu.kernels.library import PTX, Binary, pack, sources_digest, variant_name
from raystow.workers.gpu.kernels.sources.variants import Variant, variants

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
BINARIES = ROOT / "raystow/workers/gpu/kernels/binaries"
_TYPES = {"i64": "q", "i32": "i"}


def compiled(variant: Variant, architecture: int) -> CompiledKernel:
    """Compile a kernel for an architecture."""
    module, name = variant.name.split(".")
    function = getattr(importlib.import_module(f"raystow.workers.gpu.kernels.sources.{module}"), name)
    names = [parameter.name for parameter in function.params]
    signature = {name: variant.arguments.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned & set(names)}
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, GPUTarget("cuda", architecture, 32), {"num_warps": variant.warps, "enable_fp_fusion": True})


def binary(variant: Variant, kernel: CompiledKernel, kind: str) -> Binary:
    """Return the binary of a compiled kernel, as it is in the package. ``kind``: cubin or ptx."""
    made = kernel.metadata
    assert made.global_scratch_size == made.profile_scratch_size == 0, variant
    arguments = "".join(_TYPES.get(kind, "*") for kind in variant.arguments.values())
    assert kernel.asm["ptx"].split(")")[0].count(".param") == len(arguments) + 2, "the arguments, and Triton's scratch memory"
    image = kernel.asm[kind]
    image = image if isinstance(image, bytes) else image.encode() + b"\0"
    name = variant_name(variant.name, variant.constants)
    return Binary(name, made.name, arguments, 32 * made.num_warps, made.shared, image)


def main() -> None:
    """Compile all kernels for all architectures."""
    shutil.rmtree(BINARIES, ignore_errors=True)
    BINARIES.mkdir()
    all_variants = list(variants())
    for architecture in ARCHITECTURES:
        kernels = [(variant, compiled(variant, architecture)) for variant in all_variants]
        kinds = {f"sm_{architecture}": "cubin"} | ({PTX: "ptx"} if architecture == ARCHITECTURES[0] else {})
        for file, kind in kinds.items():
            data = pack(sources_digest(), f"triton {triton.__version__}", [binary(*made, kind) for made in kernels])
            (BINARIES / f"{file}.zst").write_bytes(data)
            print(f"{file}: {len(kernels)} kernels, {len(data):,} bytes")


if __name__ == "__main__":
    main()
