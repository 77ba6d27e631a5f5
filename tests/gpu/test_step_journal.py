"""The step journal on a GPU: gradients are encoded and digests taken on the GPU, and replays are exact to the bit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from helpers.journal_port import EntryBox
from torch import nn

from raystow.orchestrator.journal.state_digests import Digester
from raystow.orchestrator.journal.tracked_state import TrackedState

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

STEPS, DEVICE = 6, "cuda"
Parameters = list[nn.Parameter]
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw-loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw-capturable": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01, device="cuda"), capturable=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "muon": lambda p: torch.optim.Muon([one for one in p if one.dim() == 2], lr=0.01),
}


class Run:
    """A training in mixed precision (bf16 weights, float32 master copy, clipping), large enough for several parts."""

    def __init__(self, optimizer: str, *, seed: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(1000, 3000), nn.GELU(), nn.Linear(3000, 500), nn.BatchNorm1d(500))
        self.model = self.model.to("cuda", torch.bfloat16)
        self.master = [nn.Parameter(one.detach().float()) for one in self.model.parameters()]
        self.optimizer = OPTIMIZERS[optimizer](self.master)
        self.data = torch.Generator("cuda").manual_seed(seed)

    def step(self, *, most: float = 0.1) -> None:
        self.model.zero_grad()
        x = torch.randn(64, 1000, device="cuda", dtype=torch.bfloat16, generator=self.data)
        self.model(x).float().square().mean().backward()
        for copied, weight in zip(self.master, self.model.parameters(), strict=True):
            assert weight.grad is not None
            copied.grad = weight.grad.float()
        nn.utils.clip_grad_norm_(self.master, most)
        self.optimizer.step()
        self.copy_weights()

    def copy_weights(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(self.model.parameters()), self.master)

    def bits(self) -> list[bytes]:
        found: list[Any] = [*self.model.parameters(), *self.model.buffers(), *self.master]
        found += [value for one in self.master for value in self.optimizer.state.get(one, {}).values()]
        return [
            one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            if isinstance(one, torch.Tensor)
            else repr(one).encode()
            for one in found
        ]


def recorded(box: EntryBox, run: Run) -> None:
    journal = box.journal(run.model, run.optimizer)
    journal.replay()
    for number in range(1, STEPS + 1):
        run.step()
        journal.record(number, values=number)
    journal.close()
    assert box.steps() == list(range(1, STEPS + 1))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_are_replayed_bit_for_bit(optimizer: str) -> None:
    box, run, again = EntryBox(), Run(optimizer), Run(optimizer)
    recorded(box, run)
    journal = box.journal(again.model, again.optimizer)
    assert journal.replay(again.copy_weights) == STEPS
    journal.close()
    assert again.bits() == run.bits()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 2)])
def test_other_numbers_of_ranks_replay_bit_for_bit(before: int, after: int) -> None:
    """Ranks are threads with the same parameters, as in data parallel training."""
    box, runs = EntryBox(), [plain_run() for _ in range(before + after)]

    def record(rank: int) -> None:
        model, optimizer = runs[rank]
        journal = box.journal(model, optimizer, rank=rank, world_size=before)
        journal.replay()
        generator = torch.Generator(DEVICE).manual_seed(0)
        for number in range(1, STEPS + 1):
            for one in model.parameters():
                one.grad = torch.randn(one.shape, device=DEVICE, generator=generator)
            optimizer.step()
            journal.record(number, values=number)
        journal.close()

    def replay(rank: int) -> object:
        journal = box.journal(*runs[before + rank], rank=rank, world_size=after)
        try:
            return journal.replay()
        finally:
            journal.close()

    with ThreadPoolExecutor(max(before, after)) as pool:
        list(pool.map(record, range(before)))
        assert list(pool.map(replay, range(after))) == [STEPS] * after
    for model, _ in runs[1:]:
        for one, other in zip(model.parameters(), runs[0][0].parameters(), strict=True):
            assert torch.equal(one, other)


def plain_run() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 3000), nn.GELU(), nn.Linear(3000, 500)).to(DEVICE)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def test_clipped_gradients_take_as_many_bytes_as_bfloat16() -> None:
    box, run = EntryBox(), Run("adamw-fused")
    recorded(box, run)
    state = 14 * sum(one.numel() for one in run.master)
    assert box.info(STEPS).size <= 0.105 * state


def test_skipped_steps_of_a_scaler_are_replayed() -> None:
    box, runs = EntryBox(), [Run("adamw-fused"), Run("adamw-fused")]
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    run = runs[0]
    journal = box.journal(run.model, run.optimizer)
    journal.replay()
    for number in range(1, 5):
        for one in run.master:
            one.grad = torch.randn_like(one) * 1024
            if number == 3:
                one.grad[0] = float("inf")
        scaler.scale(torch.zeros((), device="cuda"))  # initializes the scaler
        scaler.step(run.optimizer)
        scaler.update()
        run.copy_weights()
        journal.record(number)
    journal.close()
    other = box.journal(runs[1].model, runs[1].optimizer)
    other.replay(runs[1].copy_weights)
    other.close()
    assert runs[1].bits() == runs[0].bits()


def test_a_gpu_and_a_cpu_compute_the_same_digests() -> None:
    """The state has odd sizes, a view and several dtypes; digests are of all bytes and of the sample."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    model.weight = nn.Parameter(torch.randn(1237, 2049)[:, 1:])
    model.bias = nn.Parameter(torch.randn(9_000_001).bfloat16())
    found = []
    for device in ("cpu", "cuda"):
        model.to(device)
        digester = Digester(TrackedState(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
        for whole in (False, True):
            found.append(np.frombuffer(digester.take(whole=whole).packed(), "<u8")[:-1].tolist())
    assert found[:2] == found[2:]


def test_the_spans_of_many_tensors_are_digested() -> None:
    """They are more than the rows of one launch; their tables and tensors are freed with the digester."""
    before = torch.cuda.memory_allocated()
    model = nn.ParameterList(torch.full((6_000,), number % 200, device="cuda", dtype=torch.bfloat16) for number in range(70_000))
    digester = Digester(TrackedState(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
    found = [np.frombuffer(digester.take(whole=True).packed(), "<u8")[:-1] for _ in range(2)]
    assert np.array_equal(*found)
    assert np.array_equal(found[0], np.resize(found[0][:200], 70_000))
    assert len(np.unique(found[0])) == 200
    del model, digester
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (4 << 20)


def test_a_different_step_on_the_gpu_is_detected_and_undone(caplog: pytest.LogCaptureFixture) -> None:
    box, run, again = EntryBox(), Run("adamw-fused"), Run("adamw-fused")
    recorded(box, run)
    before = again.bits()
    again.optimizer.register_step_post_hook(lambda *_: again.master[0].data.mul_(1 + 1e-6))
    journal = box.journal(again.model, again.optimizer)
    assert journal.replay(again.copy_weights) is None
    journal.close()
    assert again.bits() == before
    assert "the state differs from the recorded one" in caplog.text


def test_later_steps_do_not_change_entries_being_encoded() -> None:
    """Many short steps follow one another, each with gradients of another magnitude."""
    box, run, again = EntryBox(), Run("adamw-foreach"), Run("adamw-foreach")
    journal = box.journal(run.model, run.optimizer)
    journal.replay()
    for number in range(1, 31):
        for one in run.master:
            one.grad = torch.randn_like(one) * number
        run.optimizer.step()
        run.copy_weights()
        journal.record(number, values=number)
    journal.close()
    other = box.journal(again.model, again.optimizer)
    assert other.replay(again.copy_weights) == 30
    other.close()
    assert again.bits() == run.bits()
