"""The build step reproduces the kernel binaries in the package byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif("SEEDS" not in os.environ, reason="needs the Triton of make test-streams")

COMPARE = """
import sys
sys.path.insert(0, "tools")
import build_kernels
from raystow.workers.gpu.kernels.library import Architecture
for name in ("sm_80", "sm_90", "sm_120"):
    shipped = Architecture(name)
    assert shipped.compiler == f"triton {build_kernels.triton.__version__}"
    for variant in list(build_kernels.variants())[:: 9]:
        made = build_kernels.binary(variant, build_kernels.compiled(variant, int(name[3:])), "cubin")
        assert made == shipped.binary(made.name), made.name
print("equal")
"""


def test_the_build_step_reproduces_the_binaries(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-c", COMPARE]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr[-2000:]
