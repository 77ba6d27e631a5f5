"""The guarantees of the rules for lossy encoding, for all numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.state.lossy import rounded_chunk
from raystow.state.lossy.profiles import Lossy
from raystow.state.lossy.rules import Blockwise, MantissaBits, Rule
from raystow.state.lossy.tensor_values import words_of
from raystow.state.planner import Planner, plan_save
from raystow.storage.coding.derived import derive
from raystow.storage.coding.dtypes import MANTISSA
from raystow.storage.errors import SaveFailed, StateError

WIDE: list[Rule] = [MantissaBits(1), MantissaBits(4), MantissaBits(16), Blockwise(2, 8), Blockwise(8, 64), Blockwise(16)]
EDGES = [0.0, -0.0, 1.0, -1.0, 1.99999988, 65504.0, 65519.996, 65520.0, 3.4028235e38, 1e-45, -1e-40, 1.17549435e-38, 2.0**-25]
STRANGE = [float("inf"), -float("inf"), float("nan")]


def any_floats(dtype: str, n: int = 1 << 11, seed: int = 0) -> torch.Tensor:
    """Return numbers with random bits, including NaNs with payloads, and some numbers of similar magnitude."""
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    words = words_of(kind.itemsize)
    limits = torch.iinfo(words)
    bits = torch.randint(limits.min, limits.max, (n,), generator=generator, dtype=words).view(kind)
    return torch.cat([bits, torch.randn(n, generator=generator).to(kind), torch.tensor(EDGES + STRANGE).to(kind)])


def applied(rule: Rule, values: torch.Tensor, first: int = 0) -> torch.Tensor:
    rows = values.reshape(1, -1) if values.dim() < 2 else values
    bits, findings = rounded_chunk.rounded(rule, rows.view(words_of(values.element_size())), str(values.dtype)[6:], first)
    rounded_chunk.check("t", rule, [findings])
    return bits.view(values.dtype).reshape(values.shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(words_of(a.element_size())), b.view(words_of(b.element_size())))


@pytest.mark.parametrize("rule", WIDE, ids=str)
@pytest.mark.parametrize("dtype", MANTISSA)
def test_rounding_twice_changes_nothing(rule: Rule, dtype: str) -> None:
    """Infinities and NaNs do not change."""
    if not rule.changes(dtype):
        return
    values = any_floats(dtype)
    once = applied(rule, values)
    assert not same(once, values)
    again = once
    for _ in range(19):
        again = applied(rule, again)
    assert same(again, once)
    odd = ~values.isfinite()
    assert same(once[odd], values[odd])
    assert once[~odd].isfinite().all()


@pytest.mark.parametrize("bits", [1, 2, 5, 9, 15, 22])
def test_mantissa_bits_keep_their_bound(bits: int) -> None:
    """No number becomes zero."""
    values = any_floats("float32", seed=bits)
    values = values[values.isfinite()]
    made = applied(MantissaBits(bits), values)
    tiny = torch.finfo(torch.float32).smallest_normal
    assert ((made.double() - values.double()).abs() < 2.0**-bits * values.double().abs().clamp(min=tiny)).all()
    assert torch.equal(made == 0, values == 0)
    assert torch.equal(made.signbit(), values.signbit())
    assert not (made.view(torch.int32) & ((1 << 23 - bits) - 1)).any()


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 9), ("float16", 12)])
def test_rounding_does_not_change_derived_tensors(dtype: str, least: int) -> None:
    """All patterns of the upper 20 bits are tested with lower bits of zero, one, half, and the maximum."""
    upper = np.arange(1 << 20, dtype=np.uint32) << 12
    for lower in (0, 1, 0x800, 0xFFF):
        values = torch.from_numpy((upper | lower).view(np.float32))
        values = values[~values.isnan()]
        before = derive(values.numpy().view(np.uint8), "float32", dtype)
        for bits in (least, 16):
            made = applied(MantissaBits(bits), values)
            assert np.array_equal(derive(made.numpy().view(np.uint8), "float32", dtype), before)
            assert MantissaBits(bits).preserves_cast("float32", dtype)
    assert not MantissaBits(least - 1).preserves_cast("float32", dtype)
    assert MantissaBits(23).preserves_cast("float32", dtype)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 5),
    n=st.integers(1, 100),
    first=st.integers(0, 40),
    bits=st.integers(2, 12),
    block=st.sampled_from([8, 16, 33]),
    seed=st.integers(0, 99),
)
def test_blocks_keep_their_bound_for_any_cut_of_a_row(rows: int, n: int, first: int, bits: int, block: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((rows, first + n), generator=generator) * 10 ** torch.randint(-30, 30, (rows, 1), generator=generator)
    rule = Blockwise(bits, block)
    made = applied(rule, values)
    for begin in range(0, first + n, block):
        some = slice(begin, begin + block)
        bound = values[:, some].abs().amax(1, keepdim=True).double() * 2.0 ** (1 - bits)
        assert ((made[:, some].double() - values[:, some].double()).abs() <= bound).all()
    whole = first // block * block
    assert same(applied(rule, values[:, whole:].contiguous(), whole), made[:, whole:].contiguous())
    part = applied(rule, made[:, first:].contiguous(), first)
    assert same(part, made[:, first:].contiguous()), "rounding does not change a part of a rounded tensor"
    assert same(torch.cat([applied(rule, row.unsqueeze(0)) for row in values]), made)


def test_subnormal_numbers_and_zero_blocks_are_rounded() -> None:
    least = torch.tensor([[5e-324, 1e-320, 0.0]], dtype=torch.float64)
    assert same(applied(Blockwise(16, 8), least), least)
    coarse = applied(Blockwise(8, 8), least * 1000)
    assert not same(coarse, least * 1000)
    assert same(applied(Blockwise(8, 8), coarse), coarse)
    nothing = torch.tensor([[0.0, -0.0, math.inf]])
    assert same(applied(Blockwise(2, 8), nothing), nothing)


def test_integers_and_narrow_floats_are_never_rounded() -> None:
    for rule in WIDE:
        assert not any(map(rule.changes, ("int64", "uint8", "bool", "float8_e4m3fn", "complex64")))
    assert not MantissaBits(7).changes("bfloat16")
    for wrong in (lambda: MantissaBits(0), lambda: MantissaBits(True), lambda: Blockwise(1), lambda: Blockwise(8, 3)):
        with pytest.raises(StateError):
            wrong()


def test_planes_returns_the_planes_worth_encoding() -> None:
    assert MantissaBits(16).planes("float32") == (0, 1, 3)
    assert MantissaBits(22).planes("float32") == (0, 3)
    assert MantissaBits(5).planes("float32") == (0, 1, 2, 3)
    assert MantissaBits(3).planes("bfloat16") == (0, 1)
    assert MantissaBits(40).planes("float64") == (0, 1, 7)


class WrongBound(MantissaBits):
    """Claims half of its actual error bound."""

    def round(self, values: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        made, bound = super().round(values, first)
        return made, bound / 2


def test_an_exceeded_bound_fails_the_save_and_names_the_tensor() -> None:
    words = torch.randn(1, 1000).view(torch.int32)
    _, findings = rounded_chunk.rounded(WrongBound(4), words, "float32")
    with pytest.raises(SaveFailed, match=r"optim\.m"):
        rounded_chunk.check("optim.m", WrongBound(4), [findings])


def test_the_report_states_errors_and_saved_bytes() -> None:
    values = torch.tensor([[1.0 + 2.0**-20, 4.0, math.nan, 0.0]])
    bits, findings = rounded_chunk.rounded(MantissaBits(10), values.view(torch.int32), "float32")
    report = rounded_chunk.check("t", MantissaBits(10), [findings, findings])
    error = 2.0**-10 - 2.0**-20
    assert bits.view(torch.float32)[0, 0] == 1 + 2.0**-10
    assert (report.rule, report.error, report.relative) == ("MantissaBits(10)", error, pytest.approx(error / values[0, 0].item()))
    assert report.sqnr == pytest.approx(10 * math.log10((values[0, 0].item() ** 2 + 16) / error**2))
    assert report.spared == 2 * 13 // 8
    same_bits, nothing = rounded_chunk.rounded(MantissaBits(10), bits, "float32")
    assert torch.equal(same_bits, bits)
    assert rounded_chunk.check("t", MantissaBits(10), [nothing]).sqnr is None


def test_a_chunk_is_rounded_while_it_is_copied() -> None:
    """Tensors on a GPU use ``gather``, which is called here on the CPU; both ways use the same rounding function."""
    rules = Lossy.of({"exp_avg": MantissaBits(3), "master": Blockwise(8, 16)})
    for name, tensor in (("exp_avg.w", torch.randn(300, 50)), ("master.w", torch.randn(50, 300).t()), ("w", torch.randn(90, 90))):
        plan, before = plan_save({name: tensor}, rank=0, world_size=1, planner=Planner(rules)), tensor.clone()
        (piece,) = plan.pieces
        out = np.empty(piece.nbytes, np.uint8)
        piece.copy(out)
        shard = piece.shard
        shard.__dict__["bits"] = tensor.view(torch.int32)  # as on a device
        shard.device = 0
        gathered = piece.gather()
        assert np.array_equal(gathered.contiguous().view(torch.uint8).numpy().reshape(-1), out)
        assert torch.equal(tensor, before)
        assert piece.origin == (tensor.data_ptr() if tensor.is_contiguous() else None)
        assert (piece.address is None) == (shard.rule is not None)
        assert {*plan.rounded()} == ({name} if shard.rule is not None else set())
        plan.release()
        assert not plan.rounded()


@pytest.mark.parametrize("rule", [MantissaBits(5), Blockwise(8, 48)], ids=str)
@pytest.mark.parametrize("shape", [(1, 40_001), (7, 9_000), (3_000, 12)])
def test_large_chunks_are_rounded_in_parts(rule: Rule, shape: tuple[int, int]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).view(torch.int32)
    whole, findings = rounded_chunk.rounded(rule, values, "float32", 5, at_once=1 << 30)
    parts, found = rounded_chunk.rounded(rule, values, "float32", 5, at_once=1 << 12)
    assert torch.equal(parts, whole)
    torch.testing.assert_close(found, findings, rtol=1e-9, atol=0)
