"""Script that wrote ``golden-packs/``, a repository whose version records list no packs. The tests do not run it.

    cd tests && python compat/make_golden_packs.py compat/golden-packs-new

Two ranks on two nodes save twice. ``weights.*`` are derived from ``master.*``, ``mask`` in version 2 refers to version 1,
``none`` has no elements.
"""

import json
import sys
from pathlib import Path

import torch
from blake3 import blake3

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.local_cluster import LocalCluster

from raystow.state.shards import bits


def main(folder: str) -> None:
    generator, described = torch.Generator().manual_seed(9), {}
    state = {"none": torch.empty(0, 3), "mask": torch.arange(9000) % 7}
    for i in range(3):
        master = state[f"optimizer.master.{i}"] = torch.randn(40 + i, 60, generator=generator)
        state[f"weights.{i}"] = master.bfloat16()
    with LocalCluster(folder, nodes=2, delta=3) as cluster:
        for step in (1, 2):
            state |= {f"optimizer.moment.{i}": torch.randn(50 + i, 40, generator=generator) for i in range(3)}
            cluster.save_all([{**state, "rank": rank} for rank in range(2)], step=step, metrics={"loss": 1.0 / step})
            described[str(step)] = {name: blake3(bits(tensor).tobytes()).hexdigest() for name, tensor in state.items()}
    (Path(folder) / "expected.json").write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
