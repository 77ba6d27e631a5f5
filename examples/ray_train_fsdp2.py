"""Ray Train and FSDP2 on two CPU workers, with checkpoints that a restart picks up from, and that Train knows of.

    python examples/ray_train_fsdp2.py FOLDER [STEPS]

``FOLDER``: Ray Train's storage, and in it raystow's: s3://bucket/prefix or a folder that all nodes see. Run it again with more
``STEPS``: it goes on where it stopped, as it does when a worker dies. Runs on the Ray cluster of this machine, or starts one;
needs two CPUs.
"""

import os
import sys

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import raystow

EVERY = 2  # steps between two saves


def train(config: dict[str, int]) -> None:
    """The training function: what each of the workers runs."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with raystow.ray_train.Checkpointer() as checkpointer:  # at the end, waits until the last save is durable
        checkpointer.guard(optimizer)  # no step changes a tensor that is still being read
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments, "step": 0}
        if checkpointer.restore_latest(into=state):
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

        for step in range(state["step"] + 1, config["steps"] + 1):
            data = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
            loss = (model(data) - data).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % EVERY == 0 or step == config["steps"]:  # every rank, the same steps
                weights, moments = get_state_dict(model, optimizer)
                checkpointer.save({"model": weights, "optim": moments, "step": step}, step=step, metrics={"loss": loss.item()})


if __name__ == "__main__":
    folder = sys.argv[1] if "://" in sys.argv[1] else os.path.abspath(sys.argv[1])
    ray.init(log_to_driver=False)
    result = TorchTrainer(
        train,
        train_loop_config={"steps": int(sys.argv[2]) if len(sys.argv) > 2 else 6},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="fsdp2",
            storage_path=folder,
            failure_config=ray.train.FailureConfig(max_failures=3),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    for checkpoint, metrics in result.best_checkpoints:
        version = raystow.ray_train.version_of(checkpoint)
        print(f"version {version.id}: step {version.step}, loss {metrics['loss']:.4f}, {version.bytes:,} bytes")
