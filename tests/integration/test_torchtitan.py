"""TorchTitan's trainer objects are saved and loaded by ``raystow.torchtitan.CheckpointManager`` on two ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import raystow
from integration.gloo import RankFailed, Ranks
from integration.layouts import build

pytest.importorskip("torchtitan", reason="make test-frameworks installs TorchTitan in an environment of its own")

SAVED_AT = 2
_TAGS = itertools.count()


class Progress:
    """The state that TorchTitan's Trainer adds."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Data:
    """The data of one rank, and its position."""

    def __init__(self, rank: int) -> None:
        self.rank, self.generator = rank, torch.Generator().manual_seed(rank)

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{self.rank}": self.generator.get_state().numpy().tobytes()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(torch.frombuffer(bytearray(state[f"dp_rank_{self.rank}"]), dtype=torch.uint8))


def train(rank: int, n: int, folder: str, steps: int, options: dict[str, Any]) -> tuple[bool, list[str]]:
    """Train as TorchTitan's Trainer does, from the newest version to ``steps``; return whether a version was loaded, and the
    losses."""
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

    from raystow.torchtitan import CheckpointManager

    model, _ = build("fsdp", n, 1, f"titan{n}x{next(_TAGS)}")
    adamw = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})
    optimizers = OptimizersContainer.Config(param_groups=[adamw], implementation="for-loop").build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=4).build(optimizers=optimizers, training_steps=20)
    progress, data = Progress(), Data(rank)
    config = CheckpointManager.Config(enable=True, folder=folder, interval=SAVED_AT, last_save_model_only=False, **options)
    manager = config.build(
        dataloader=data,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": progress},
        sd_adapter=None,
        base_folder="",
    )
    assert type(manager) is CheckpointManager
    losses, loaded = list[str](), manager.load(options.get("load_step", -1))
    while progress.step < steps:
        progress.step += 1
        loss = model(torch.randn(8, 24, generator=data.generator)).square().mean()
        loss.backward()
        manager.maybe_wait_for_staging()
        optimizers.step()
        optimizers.zero_grad()
        schedulers.step()
        losses.append(loss.item().hex())
        manager.save(progress.step, last_step=progress.step == steps)
    manager.maybe_wait_for_saving()
    manager.close()
    return loaded, losses


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_torchtitan_resumes_bit_for_bit(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """``keep_latest_k`` becomes the retention policy, and the version of TorchTitan's last step is loaded, too."""
    options = {"async_mode": mode, "keep_latest_k": 2}
    whole = ranks.call(2, train, str(tmp_path / "whole"), 7, options)
    first = ranks.call(2, train, str(tmp_path / "halves"), 3, options)
    second = ranks.call(2, train, str(tmp_path / "halves"), 7, options)
    assert [loaded for loaded, _ in (*whole, *first, *second)] == [False] * 4 + [True] * 2
    assert [a + b for (_, a), (_, b) in zip(first, second, strict=True)] == [losses for _, losses in whole]
    versions = raystow.open(tmp_path / "halves").versions()
    assert [version.step for version in versions] == [6, 7]
    assert {"norm.weight", "optimizer.state.norm.weight.exp_avg", "train_state.step"} <= versions[-1].tensors().keys()


def test_torchtitan_loads_a_chosen_step_and_another_repository(ranks: Ranks, tmp_path: Path) -> None:
    saved, other = str(tmp_path / "saved"), str(tmp_path / "other")
    [(_, losses), _] = ranks.call(2, train, saved, 5, {})
    started = {"initial_load_path": saved, "initial_load_model_only": False}
    assert ranks.call(2, train, other, 6, started)[0] == (True, ranks.call(2, train, saved, 6, {})[0][1])
    assert ranks.call(2, train, saved, 5, {"load_step": 2})[0] == (True, losses[2:])
    with pytest.raises(RankFailed, match="there is no version of step 3"):
        ranks.call(2, train, saved, 5, {"load_step": 3})


def test_torchtitan_accepts_the_example_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.config.manager import ConfigManager

    from raystow.torchtitan import CheckpointManager

    pytest.importorskip("triton", reason="TorchTitan's models import it")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    name = ["--module", "torchtitan_llama3", "--config", "llama3_8b"]
    config = ConfigManager().parse_args([*name, "--checkpoint.interval", "7"])
    assert type(config.checkpoint) is CheckpointManager.Config
    assert (config.checkpoint.folder, config.checkpoint.interval) == ("s3://bucket/runs/llama", 7)
