"""The example of docs/journal.md resumes bit for bit when it is copied: it runs as it stands, in processes that are killed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from helpers.state_equality import same
from ray.exceptions import RayActorError
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import raystow
from integration.ranks import Rank, take

pytestmark = pytest.mark.usefixtures("cluster")

DOCUMENT = Path(__file__).parents[2] / "docs" / "journal.md"
STEPS = 108
KILLED = 5, 104
"""Steps in which processes are killed: before the first version, and after that of step 100."""


def run(self: Rank, uri: str, generators: dict[str, Any] | None, killed: int) -> dict[str, Any]:
    """Run the example in this process, which is killed in a step; 0: in none. Return where it began, and what it ended with.
    ``generators``: of a first start. Other starts must not depend on theirs, which are those of a new process."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1)
    loader = StatefulDataLoader(TensorDataset(torch.randn(40, 8)), batch_size=8, shuffle=True)
    begun = list[int]()
    torch.seed()
    if generators is not None:
        raystow.Rng().load_state_dict(generators)

    def train_step(batch: list[torch.Tensor]) -> None:
        begun.append(scheduler.last_epoch + 1)
        optimizer.zero_grad()
        noise = torch.from_numpy(np.random.standard_normal(8)).float()
        model(batch[0] + noise).square().mean().backward()
        optimizer.step()
        scheduler.step()
        if begun[-1] == killed:
            os.kill(os.getpid(), signal.SIGKILL)

    (example, *_) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    names = {"raystow": raystow, "uri": uri, "steps": STEPS, "train_step": train_step, "loader": loader}
    names |= {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    exec(example, names)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "rng": raystow.Rng()}
    return {"begun": begun[0], **{name: dict(part.state_dict()) for name, part in parts.items()}}


@pytest.mark.long
def test_the_example_resumes_bit_for_bit(tmp_path: Path) -> None:
    generators, uri = raystow.Rng().state_dict(), str(tmp_path / "killed")
    undisturbed = ray.get(take("node_a").do.remote(run, str(tmp_path / "undisturbed"), generators, 0), timeout=300)
    assert undisturbed.pop("begun") == 1
    for start, killed in zip((generators, None), KILLED, strict=True):
        with pytest.raises(RayActorError):
            ray.get(take("node_a").do.remote(run, uri, start, killed), timeout=300)
    resumed = ray.get(take("node_a").do.remote(run, uri, None, 0), timeout=300)
    assert KILLED[-1] - 1 <= resumed.pop("begun") <= KILLED[-1]
    assert [version.step for version in raystow.open(uri).versions()] == [100]
    for name, part in resumed.items():
        assert same(part, undisturbed[name]), name
