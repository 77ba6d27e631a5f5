"""Ray Train and FSDP2 on every GPU of a cluster that may lose any of its nodes: what the RayJob in ``k8s/`` runs.

    python examples/ray_train_on_kuberay.py URI STEPS WORKERS [--cpu]

``URI``: the repository, s3://bucket/prefix or a folder that all nodes see. ``WORKERS``: GPUs, or with ``--cpu`` CPUs and a small
model. When a node is going to be taken away, all save at once; when it is gone, training goes on from there as soon as there are
``WORKERS`` again. Run anew, it goes on where it stopped.
"""

import argparse
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import raystow

EVERY = 100  # steps between two saves
LOOK = 10  # steps between two looks at whether a node is going to be taken away: each takes all workers some milliseconds


def train(config: dict[str, Any]) -> None:
    """The training function: what each of the workers runs."""
    context, device = ray.train.get_context(), ray.train.torch.get_device()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    width, layers = config["width"], config["layers"]
    block = [torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(layers)]
    model = torch.nn.Sequential(*block).to(device)
    for layer in (*model, model):
        fully_shard(layer, mesh=init_device_mesh(device.type, (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    with raystow.Checkpointer(config["uri"]) as checkpointer:  # at the end, waits until the last save is durable
        checkpointer.guard(optimizer)  # no step changes a tensor that is still being read
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments, "step": 0}
        if checkpointer.restore_latest(into=state):
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

        leaving = None  # the notice that was heard of last
        for step in range(state["step"] + 1, config["steps"] + 1):
            seed = torch.Generator(device).manual_seed(1000 * step + rank)
            data = torch.randn(8, 128, width, device=device, generator=seed)
            loss = (model(data) - data).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            notice = ray.train.get_preemption_info() if step % LOOK == 0 else leaving  # all workers get the same answer
            if step % EVERY == 0 or step == config["steps"] or notice != leaving:  # every rank, the same steps
                weights, moments = get_state_dict(model, optimizer)
                state = {"model": weights, "optim": moments, "step": step}
                checkpointer.save(state, step=step, metrics={"loss": loss.item()})
            leaving = notice


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("uri")
    parser.add_argument("steps", type=int)
    parser.add_argument("workers", type=int)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    size = {"width": 64, "layers": 2} if args.cpu else {"width": 1024, "layers": 10}  # 126 million parameters
    ray.init(log_to_driver=False)
    TorchTrainer(
        train,
        train_loop_config={"uri": args.uri, "steps": args.steps, **size},
        torch_config=TorchConfig(backend="gloo" if args.cpu else "nccl"),
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, use_gpu=not args.cpu),
        # Nodes that were announced to go do not count; those that die do.
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=10)),
    ).fit()
    for version in raystow.open(args.uri).versions():
        print(f"version {version.id}: step {version.step}, loss {version.metrics['loss']:.4f}, {version.bytes:,} bytes")
