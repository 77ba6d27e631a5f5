"""Optimizers whose state is in host memory: a killed training resumes bit for bit, and a GPU codes that state."""

from __future__ import annotations

import hashlib
import importlib.util
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn

import raystow
from raystow.storage.coding.chunk import DEFLATE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

WIDTH, LAYERS, STEPS, EVERY, DEATH = 2048, 8, 9, 3, 8  # 400 MB of fp32 weights and moments, so that the GPU codes them
WITHOUT_DEEPSPEED = importlib.util.find_spec("deepspeed") is None
SYSTEMS = ["fsdp2", pytest.param("zero", marks=pytest.mark.skipif(WITHOUT_DEEPSPEED, reason="needs DeepSpeed"))]


def model(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


def data(step: int) -> torch.Tensor:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()


def digest(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(one.detach().cpu().contiguous().numpy().tobytes()).hexdigest() for name, one in tensors.items()}


def die(step: int, death: int) -> None:
    if step == death:
        os.kill(os.getpid(), signal.SIGKILL)


def fsdp2(uri: str, death: int) -> tuple[int, dict[str, str]]:
    """Train with FSDP2 and ``CPUOffloadPolicy``; return the step that was restored, and digests of the state at the end."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    net, mesh = model("cpu"), init_device_mesh("cuda", (1,))
    for part in (*net, net):
        fully_shard(
            part, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), offload_policy=CPUOffloadPolicy()
        )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with raystow.Checkpointer(uri) as checkpointer:
        checkpointer.guard(optimizer)
        state = {"model": net, "optimizer": optimizer}
        version = checkpointer.restore_latest(into=state)
        begin = 0 if version is None else version.step
        for step in range(begin + 1, STEPS + 1):
            net(data(step)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % EVERY == 0:
                pending = checkpointer.save(state, step=step)
            die(step, death)
        pending.result()
    tensors = {name: one.full_tensor() for name, one in net.state_dict().items()}
    moments = [optimizer.state[one][key].full_tensor() for one in net.parameters() for key in ("exp_avg", "exp_avg_sq")]
    return begin, digest({**tensors, **{str(number): one for number, one in enumerate(moments)}})


def zero(uri: str, death: int) -> tuple[int, dict[str, str]]:
    """Do as ``fsdp2`` with ZeRO-Offload of DeepSpeed."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    import raystow.deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 32,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model("cuda"), config=config)
    with raystow.deepspeed.attach(engine, uri):
        engine.load_checkpoint("checkpoints")
        begin = engine.global_steps
        while engine.global_steps < STEPS:
            engine.backward(engine(data(engine.global_steps + 1).bfloat16()).float().square().mean())
            engine.step()
            if engine.global_steps % EVERY == 0:
                engine.save_checkpoint("checkpoints")
            die(engine.global_steps, death)
    found = dict[str, torch.Tensor]()
    for name, parameter in engine.module.named_parameters():
        found[name], found[f"{name}.master"] = parameter.float(), safe_get_full_fp32_param(parameter)
        found |= {f"{name}.{key}": safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")}
    return begin, digest(found)


def train(system: str, cluster: str, folder: str, death: int, queue: Any) -> None:
    """The only rank."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29541")
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    ray.init(address=cluster, log_to_driver=False, logging_level="error")
    queue.put({"fsdp2": fsdp2, "zero": zero}[system](folder, death))
    queue.close()
    queue.join_thread()
    os._exit(0)


def run(system: str, cluster: str, folder: Path, *, death: int = 0) -> Any:
    """Train in a new process; return what ``train`` gives, None if the process was killed."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=train, args=(system, cluster, str(folder), death, queue))
    process.start()
    found = None if death else queue.get(timeout=180)
    process.join(180)
    assert process.exitcode == (-signal.SIGKILL if death else 0)
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        context = ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
        yield context.address_info["gcs_address"]
        ray.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_killed_training_with_an_offloaded_optimizer_resumes(system: str, folder: Path, cluster: str) -> None:
    assert run(system, cluster, folder / "killed", death=DEATH) is None
    begin, resumed = run(system, cluster, folder / "killed")
    assert begin in (EVERY, 2 * EVERY), "the save of step 6 may have been in progress"
    never, undisturbed = run(system, cluster, folder / "undisturbed")
    assert never == 0
    assert resumed == undisturbed
    version = raystow.latest(str(folder / "killed"))
    assert version is not None
    assert any("in host memory, too" in why for why in version.record.coding.values())
    moments = [rows for name, rows in version.chunks.items() if "exp_avg" in name]
    assert moments
    assert {codec for rows in moments for row in rows for codec in row.coding.codecs} >= {DEFLATE}
