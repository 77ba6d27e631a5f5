"""Saving and restoring on a GPU need neither Triton nor a C compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

DEVICE = "cuda"
WITHOUT_TRITON = """
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec

def find_others(name, path=None, target=None):
    return None if name.partition(".")[0] == "triton" else find_spec(name, path, target)

PathFinder.find_spec = find_others
"""
"""A ``sitecustomize`` that hides Triton. Python imports it at its start, also in Ray's processes (the node worker)."""


def state(device: str) -> dict[str, torch.Tensor]:
    """Return tensors large enough for the GPU's kernels, equal in every process: weights, their master copy, random bits."""
    numbers = torch.Generator().manual_seed(0)
    master = torch.randn(20_000_003, generator=numbers) * 0.02
    bits = torch.randint(-(1 << 31), 1 << 31, (5_000_001,), generator=numbers).to(torch.int32)
    gradient = (torch.randn(9_000_001, generator=numbers) * 1e-4).bfloat16()
    host = {"master": master, "weights": master.bfloat16(), "any bits": bits.view(torch.float32), "gradient": gradient}
    return {name: tensor.to(device) for name, tensor in host.items()}


def check_environment() -> None:
    import importlib.util
    import shutil

    assert shutil.which("gcc") is None
    assert shutil.which("cc") is None
    assert "triton" not in sys.modules
    assert importlib.util.find_spec("triton") is None


def save_or_restore(what: str, folder: str, place: str, device: str) -> None:
    """Save or restore with a new Ray cluster. ``place`` is the process that encodes."""
    import ray

    import raystow

    check_environment()
    ray.init("local", num_cpus=2, num_gpus=int(device == "cuda"), include_dashboard=False, log_to_driver=False)
    ray.get(ray.remote(check_environment).options(num_cpus=0).remote(), timeout=60)
    saved = state(device)
    compression = raystow.Compression(process=place)
    with raystow.Checkpointer(folder, rank=0, world_size=1, compression=compression) as checkpointer:
        if what == "save":
            print("stored", checkpointer.save(saved, step=1).result(60).bytes)
        else:
            into = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
            assert checkpointer.restore_latest(into=into) is not None
            for name, tensor in saved.items():
                assert into[name].device == tensor.device
                assert torch.equal(into[name].view(torch.uint8), tensor.view(torch.uint8)), name
            print("restored")
    ray.shutdown()
    check_environment()


def run(what: str, folder: Path, place: str) -> subprocess.CompletedProcess[str]:
    """Save or restore in a new process without Triton and without a C compiler."""
    for name in ("bin", "triton", "site"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(WITHOUT_TRITON)
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    environment["PATH"] = str(folder / "bin")
    environment["TRITON_CACHE_DIR"] = str(folder / "triton")
    environment["PYTHONPATH"] = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, __file__, what, str(folder / "repository"), place, DEVICE]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize("place", ["training", "node"])
def test_a_state_is_saved_and_restored_without_compiler(tmp_path: Path, place: str) -> None:
    saved = run("save", tmp_path, place)
    assert saved.returncode == 0, saved.stderr
    state_bytes = sum(tensor.nbytes for tensor in state("cpu").values())
    assert 0 < int(saved.stdout.split()[-1]) < 0.85 * state_bytes
    for warning in ("the CPU compresses tensors of the GPU", "is not available"):
        assert warning not in saved.stderr
    restored = run("restore", tmp_path, place)
    assert (restored.returncode, restored.stdout) == (0, "restored\n"), restored.stderr
    assert not list((tmp_path / "triton").iterdir())


if __name__ == "__main__":
    save_or_restore(*sys.argv[1:])
