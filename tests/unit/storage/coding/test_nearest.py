"""Rounding to the nearest number with fewer mantissa bits, compared with conversions of torch and with the documented bounds."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from raystow.storage.coding import nearest
from raystow.storage.coding.dtypes import MANTISSA, to_numpy
from raystow.storage.coding.nearest import round_to_nearest
from raystow.storage.errors import Damaged


def words(numbers: np.ndarray) -> np.ndarray:
    return numbers.view(f"u{numbers.itemsize}")


def every_kind(dtype: str) -> np.ndarray:
    """Return random bits: numbers of all magnitudes, infinities, and NaNs."""
    size = to_numpy(dtype).itemsize
    made = np.frombuffer(np.random.default_rng(0).bytes(100_003 * size), to_numpy(dtype)).copy()
    made[:4] = [np.inf, -np.inf, ml_dtypes.finfo(made.dtype).max, ml_dtypes.finfo(made.dtype).smallest_subnormal]
    return made


@pytest.mark.parametrize(("wide", "narrow"), [("float32", "bfloat16"), ("float32", "float16"), ("float64", "float32")])
def test_rounding_equals_a_conversion_to_a_narrower_dtype(wide: str, narrow: str) -> None:
    numbers = np.random.default_rng(1).standard_normal(100_003).astype(to_numpy(wide))
    # smaller numbers have fewer bits in the narrow dtype
    numbers = numbers[np.abs(numbers) > ml_dtypes.finfo(to_numpy(narrow)).smallest_normal]
    expected = torch.from_numpy(numbers).to(getattr(torch, narrow)).to(getattr(torch, wide)).numpy()
    found = round_to_nearest(numbers.view(np.uint8), wide, MANTISSA[narrow])
    assert np.array_equal(words(numbers), words(expected))
    assert found.spared == pytest.approx(numbers.size * (MANTISSA[wide] - MANTISSA[narrow]) / 8, rel=0.2)


@pytest.mark.parametrize("bits", [1, 4, 6])
@pytest.mark.parametrize("dtype", MANTISSA)
def test_rounding_errors_are_bounded_and_reported(dtype: str, bits: int) -> None:
    before, after = every_kind(dtype), every_kind(dtype)
    found = round_to_nearest(after.view(np.uint8), dtype, bits)
    with np.errstate(over="ignore", invalid="ignore"):
        was, made = before.astype(np.float64), after.astype(np.float64)
        finite = np.isfinite(was)
        error = np.abs(was - made)[finite]
        noise = np.square(error).sum()
    assert np.array_equal(words(after)[~finite], words(before)[~finite])
    assert np.isfinite(made[finite]).all()
    assert not (words(after)[finite] % (1 << MANTISSA[dtype] - bits)).any()
    relative = error / np.maximum(np.abs(was[finite]), float(ml_dtypes.finfo(before.dtype).smallest_normal))
    assert (relative > 2.0 ** -(bits + 1)).sum() <= 1 + 2e-3 * relative.size, "only numbers that would round to infinity"
    assert (found.error, found.relative) == (error.max(), relative.max())
    assert 2.0 ** -(bits + 2) < found.relative < 2.0**-bits
    assert found.noise == pytest.approx(noise)


@pytest.mark.parametrize("dtype", MANTISSA)
def test_rounding_twice_changes_nothing(dtype: str) -> None:
    once = every_kind(dtype)
    round_to_nearest(once.view(np.uint8), dtype, 3)
    twice = once.copy()
    found = round_to_nearest(twice.view(np.uint8), dtype, 3)
    assert np.array_equal(words(twice), words(once))
    assert (found.error, found.noise, found.spared) == (0.0, 0.0, 0)


def test_an_error_above_the_bound_raises_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = np.array([np.finfo(np.float32).max], np.float32)
    monkeypatch.setattr(nearest.np, "copyto", lambda *_, **__: None)  # so that the number becomes infinite
    with pytest.raises(Damaged, match="more than rounding to 4 bits"):
        round_to_nearest(largest.view(np.uint8), "float32", 4)
