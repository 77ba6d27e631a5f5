"""Save and restore on two ranks of Ray with tracing, and write the spans of all processes into a folder:

    python examples/traced_training.py ./traced

Each process of the cluster calls ``set_up``, as Ray's option ``--tracing-startup-hook`` asks. In production it sends its spans to
a collector: with ``BatchSpanProcessor(OTLPSpanExporter())``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ray
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

import raystow

RANKS = 2


def set_up() -> None:
    """Write the spans of this process into a file, one in a line."""
    file = Path(os.environ["TRACES"], f"{os.getpid()}.jsonl").open("a")  # noqa: SIM115 (open until the process ends)
    exporter = ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


class Trainer:
    """One rank."""

    def train(self, uri: str, rank: int) -> int:
        """Save a step and restore it. Return the step."""
        policy = raystow.Policy(keep_last=1)
        with raystow.Checkpointer(uri, rank=rank, world_size=RANKS, retention=policy) as checkpointer:
            torch.manual_seed(0)
            state = {"model": torch.randn(20_000_000)}
            checkpointer.save(state, step=1).result()
            restored = checkpointer.restore(state)
        assert restored is not None
        return restored.step


def main(folder: Path) -> None:
    """Train in a cluster of this process."""
    traces = folder / "traces"
    traces.mkdir(parents=True)
    os.environ["TRACES"] = str(traces.resolve())
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(Path(__file__).parent))
    ray.init(num_cpus=RANKS, include_dashboard=False, _tracing_startup_hook="traced_training:set_up")
    ranks = [ray.remote(Trainer).remote() for _ in range(RANKS)]
    with trace.get_tracer("training").start_as_current_span("training"):
        steps = ray.get([one.train.remote(str((folder / "run").resolve()), rank) for rank, one in enumerate(ranks)])
    print(f"all ranks have restored step {steps[0]}; the spans are in {traces}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
