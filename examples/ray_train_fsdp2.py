"""Train with Ray Train and FSDP2 on two CPU workers, and resume from checkpoints that Train lists.

    python examples/ray_train_fsdp2.py FOLDER [STEPS]

``FOLDER``: the storage path of Ray Train, which also contains the repository: ``s3://bucket/prefix`` or a folder that all nodes
share. To continue a run, start it again with more ``STEPS``. Uses the Ray cluster of this machine or starts one; needs
two CPUs.
"""

import os
import sys

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import raystow

EVERY = 2  # steps between saves


def train(config: dict[str, int]) -> None:
    """The training function of each worker."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with raystow.ray_train.Checkpointer() as checkpointer:  # the end of the block waits for the last save
        checkpointer.guard(optimizer)  # an optimizer step waits until the tensors have been read
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments, "step": 0}
        if checkpointer.restore_latest(into=state):
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        else:
            optimizer.state.clear()  # get_state_dict has counted a step

        for step in range(state["step"] + 1, config["steps"] + 1):
            data = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
            loss = (model(data) - data).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % EVERY == 0 or step == config["steps"]:  # the same steps on every rank
                weights, moments = get_state_dict(model, optimizer)
                state = {"model": weights, "optim": moments, "step": step}
                distributed.all_reduce(loss.detach())  # in place: the sum over all ranks
                checkpointer.save(state, step=step, metrics={"loss": loss.item() / world})


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
