"""A training on a GPU that saves, and one that is killed and resumed, end with the same bits as one that does neither."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

STEPS, EVERY, DEATH = 24, 5, 17
WIDTH, VOCABULARY = 384, 256


def fresh() -> dict[str, Any]:
    """Return bf16 weights, their master copy, Adam's moments, the step, and the states of the random generators."""
    torch.manual_seed(7)
    shapes = {"embed": (VOCABULARY, WIDTH), "up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH), "head": (VOCABULARY, WIDTH)}
    master = {name: torch.randn(shape, device="cuda") * 0.02 for name, shape in shapes.items()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in master.items()}
    weights = {name: tensor.bfloat16() for name, tensor in master.items()}
    return {
        "weights": weights,
        "master": master,
        "m": zeros,
        "v": {n: t.clone() for n, t in zeros.items()},
        "step": 0,
        "generators": generators(),
    }


def generators() -> dict[str, torch.Tensor]:
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()}


def step(state: dict[str, Any], text: torch.Tensor) -> None:
    """Run one AdamW step on random excerpts of a real text."""
    weights = {name: tensor.requires_grad_(True) for name, tensor in state["weights"].items()}
    starts = torch.randint(len(text) - 65, (32, 1))
    batch = text[(starts + torch.arange(65)).cuda()].long()
    hidden = weights["embed"][batch[:, :-1]]
    hidden = hidden + torch.relu(hidden @ weights["up"].T) @ weights["down"].T
    hidden = torch.nn.functional.dropout(hidden, 0.1)  # draws from the default generator of the GPU
    loss = torch.nn.functional.cross_entropy((hidden @ weights["head"].T).float().flatten(0, 1), batch[:, 1:].flatten())
    grads = torch.autograd.grad(loss, list(weights.values()))
    state["step"] += 1
    for (name, weight), grad in zip(weights.items(), grads, strict=True):
        grad, m, v, master = grad.float(), state["m"][name], state["v"][name], state["master"][name]
        m.lerp_(grad, 0.1)
        v.mul_(0.95).addcmul_(grad, grad, value=0.05)
        master.mul_(1 - 1e-4).sub_(1e-3 * m / (1 - 0.9 ** state["step"]) / ((v / (1 - 0.95 ** state["step"])).sqrt() + 1e-8))
        weight.requires_grad_(False).copy_(master)


def train(folder: str, death: int, *, saves: bool) -> None:
    """Train from the newest version to the end, or to step ``death``, where the process kills itself; print a digest."""
    from blake3 import blake3
    from helpers.local_cluster import LocalCluster

    import raystow

    torch.use_deterministic_algorithms(True)
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).cuda()
    state = fresh()
    with LocalCluster(folder, memory=256 << 20) as cluster:  # of the default codec, which is chosen by measurements
        if raystow.restore_latest(folder, into=state) is not None:
            torch.set_rng_state(state["generators"]["cpu"])
            torch.cuda.set_rng_state(state["generators"]["cuda"])
        while state["step"] < STEPS:
            step(state, text)
            if state["step"] == death:
                os.kill(os.getpid(), signal.SIGKILL)
            if saves and state["step"] % EVERY == 0:
                state["generators"] = generators()
                cluster.save(state, step=state["step"])
    parts = [tensor for group in ("weights", "master", "m", "v") for tensor in state[group].values()]
    print(blake3(b"".join(part.cpu().view(torch.uint8).numpy().tobytes() for part in parts)).hexdigest())


def run(folder: Path, death: int = 0, *, saves: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, str(folder), str(death), str(int(saves))]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_killed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "undisturbed", saves=False)
    assert undisturbed.returncode == 0, undisturbed.stderr
    killed = run(tmp_path / "killed", DEATH)
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, ""), killed.stderr
    resumed = run(tmp_path / "killed")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout == undisturbed.stdout != ""
    assert run(tmp_path / "saved").stdout == undisturbed.stdout


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), saves=sys.argv[3] == "1")
