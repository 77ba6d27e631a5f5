"""Tensors on a GPU that are saved with lossy rules: they are rounded and encoded on the GPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.local_cluster import LocalCluster

import raystow
from raystow.state.lossy import rounded_chunk
from raystow.state.lossy.rules import Blockwise, MantissaBits, Rule
from raystow.state.lossy.sqnr import Sqnr
from raystow.state.lossy.tensor_values import Numbers
from raystow.storage.errors import SaveFailed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here")]

N = 9_000_001
RULES: dict[str, Rule] = {"master": MantissaBits(16), "exp_avg": Blockwise(8, 256), "exp_avg_sq": MantissaBits(5)}


def mixed(n: int = N) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    master, moments = (torch.randn(n, generator=generator, device="cuda") for _ in range(2))
    master, moments = master * 0.02, moments * 1e-4
    return {
        "model.w": master.bfloat16(),
        "master.w": master,
        "exp_avg.w": moments,
        "exp_avg.tied": moments.clone(),
        "exp_avg_sq.w": moments.square() * 3,
        "exp_avg.t": torch.randn(3000, 700, generator=generator, device="cuda").t(),
        "ids": torch.arange(n, device="cuda"),
    }


def rounded(state: dict[str, torch.Tensor], rules: dict[str, Rule]) -> dict[str, torch.Tensor]:
    made = {name: tensor.cpu() for name, tensor in state.items()}
    for name, tensor in made.items():
        if (rule := rules.get(name.partition(".")[0])) is not None:
            rounded_chunk.round_in_place(rule, tensor)
    return made


@pytest.mark.parametrize(
    "rule", [MantissaBits(1), MantissaBits(5), MantissaBits(16), Blockwise(8, 64), Blockwise(2, 33)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_gpu_and_the_cpu_round_equally(rule: Rule, dtype: torch.dtype) -> None:
    name, words = str(dtype)[6:], {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    if not rule.changes(name):
        pytest.skip("the rule does not change this dtype")
    limits = torch.iinfo(words)
    bits = torch.randint(limits.min, limits.max, (40, 1001), dtype=words)
    bits[20:] = torch.randn(20, 1001).to(dtype).view(words)
    on_cpu, found = rounded_chunk.rounded(rule, bits, name, 7)
    on_gpu, errors = rounded_chunk.rounded(rule, bits.cuda(), name, 7)
    assert torch.equal(on_gpu.cpu(), on_cpu)
    assert torch.equal(errors.cpu()[[0, 1, 5]], found[[0, 1, 5]])
    torch.testing.assert_close(errors.cpu(), found, rtol=1e-9, atol=0, equal_nan=True)


@pytest.mark.parametrize("asked", [Sqnr(40), Sqnr(40, ())], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_gpu_and_the_cpu_choose_the_same_rule(asked: Sqnr, dtype: torch.dtype) -> None:
    name, words = str(dtype)[6:], {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    generator = torch.Generator().manual_seed(0)
    normal, tenth = torch.randn(700, 900, generator=generator), torch.rand(700, 900, generator=generator) < 0.1
    kinds = {"normal": normal, "wide": normal * (normal * 3).exp(), "spikes": normal * torch.where(tenth, 90.0, 1.0)}
    kinds |= {"rounded": normal.bfloat16().float() / 2, "nothing": normal * 0, "strange": normal.masked_fill(tenth, float("nan"))}
    for kind, values in kinds.items():
        bits, boxes = values.to(dtype).view(words), [((0, 0), (400, 900)), ((400, 0), (300, 900))]
        places = bits.numpy(), bits.cuda().t().contiguous().t()
        on_cpu, on_gpu = (asked.choose(functools.partial(Numbers, kind, name, where, boxes)) for where in places)
        assert on_gpu == on_cpu, (kind, on_gpu, on_cpu)


@pytest.mark.parametrize("place", ["training", "node"])
def test_the_rule_chosen_for_a_tensor_stays_the_same(tmp_path: Path, place: str) -> None:
    state = mixed()
    state["exp_avg.w"][::500] *= 1000
    lossy = {"exp_avg": Sqnr(36), "exp_avg_sq": Sqnr(36), "master": Sqnr(61)}
    with LocalCluster(str(tmp_path), process=place, memory=512 << 20, lossy=lossy) as cluster:
        versions = [cluster.save(state, step=1)]
        for step in (2, 3, 4):
            into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            raystow.restore_latest(cluster.uri, into=into)
            versions.append(cluster.save(into, step=step))
            assert all(torch.equal(versions[-1].read(name), versions[0].read(name)) for name in state), step
            assert not any(one.noise for one in versions[-1].rounded().values()), step
        changed = {name: tensor * 1.0001 if tensor.is_floating_point() else tensor for name, tensor in state.items()}
        last = cluster.save(changed, step=9)
        raystow.open(cluster.uri).verify(last, deep=True)
    for version in (versions[0], last):
        assert not version.tensors()["model.w"].stored or version is last, "the weights are derived from the stored master copy"
        for name, one in version.rounded().items():
            assert (one.sqnr or 0) >= (61 if "master" in name else 36), (name, one)
            assert "exp_avg_sq" not in name or one.rule == "MantissaBits(5)", (name, one)
        assert (version.read("exp_avg_sq.w") == 0).equal(state["exp_avg_sq.w"].cpu() == 0)
    assert torch.equal(versions[0].read("model.w"), state["model.w"].cpu())


@pytest.mark.parametrize("place", ["training", "node"])
@pytest.mark.parametrize("codec", ["deflate", "zstd", "ans", "raw", "cpu"])
def test_rounded_tensors_are_smaller_and_restored_exactly(tmp_path: Path, codec: str, place: str) -> None:
    if (codec, place) == ("cpu", "node"):
        pytest.skip("this codec encodes nothing on a GPU")
    state = mixed()
    wanted = rounded(state, RULES)
    with LocalCluster(str(tmp_path), codec=codec, process=place, memory=512 << 20, lossy=RULES) as cluster:
        for step in range(2):
            version = cluster.save(state, step=step)
            infos, found = version.tensors(), version.rounded()
            assert {*found} == {name for name in state if name.partition(".")[0] in RULES}
            assert [name for name, info in infos.items() if not info.stored] == ["exp_avg.tied", "model.w"]
            if codec in ("deflate", "cpu"):
                ratios = {name: infos[name].stored / infos[name].nbytes for name in ("master.w", "exp_avg.w", "exp_avg_sq.w")}
                assert ratios["master.w"] < 0.65
                assert max(ratios["exp_avg.w"], ratios["exp_avg_sq.w"]) < 0.36, ratios
            into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            raystow.restore_latest(cluster.uri, into=into)
            for name, tensor in wanted.items():
                assert torch.equal(into[name].cpu(), tensor), (step, name)
            if codec != "ans":
                raystow.open(cluster.uri).verify(version, deep=True)
        again = cluster.save(into, step=9)
        assert not any(one.noise for one in again.rounded().values()), "a restored state is rounded already"


def test_weights_are_not_derived_from_eight_bit_masters(tmp_path: Path) -> None:
    state = mixed(200_000)
    with LocalCluster(str(tmp_path), memory=256 << 20, lossy={"master": MantissaBits(8)}) as cluster:
        version = cluster.save(state, step=1)
    assert version.tensors()["model.w"].stored
    assert torch.equal(version.read("model.w"), state["model.w"].cpu())


def test_a_violated_error_bound_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(rule: MantissaBits, values: torch.Tensor, first: int) -> tuple[Any, Any]:
        made, bound = honest(rule, values, first)
        return made, bound / 4

    honest = MantissaBits.round
    monkeypatch.setattr(MantissaBits, "round", careless)
    with LocalCluster(str(tmp_path), memory=256 << 20, lossy={"master": MantissaBits(16)}) as cluster:
        with pytest.raises(SaveFailed, match=r"master\.w: MantissaBits\(16\) has changed"):
            cluster.save(mixed(200_000), step=1)
        assert not cluster.repository.versions()
