"""``cast=True``: saved values are converted to the dtype of the target. Without it, another dtype is an error with both
dtypes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.local_cluster import LocalCluster

import raystow

NUMBERS = torch.tensor([[0.0, -0.0, 1.0, 3.14159265], [1e-3, -448.0, 240.0, 0.1]], dtype=torch.float64)
TORCH = {"double": torch.float64, "float": torch.float32, "half": torch.bfloat16, "eighth": torch.float8_e4m3fn}
NUMPY = {"double": np.float64, "float": np.float32, "half": ml_dtypes.bfloat16, "eighth": ml_dtypes.float8_e4m3fn}


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the address of a repository with the numbers in each dtype, as tensors (``t``) and as arrays (``a``)."""
    uri = str(tmp_path_factory.mktemp("run"))
    tensors = {name: NUMBERS.to(dtype) for name, dtype in TORCH.items()}
    arrays = {name: NUMBERS.numpy().astype(dtype) for name, dtype in NUMPY.items()}
    with LocalCluster(uri) as cluster:
        packed = torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        others = {"point": torch.tensor(2.5), "none": torch.zeros(2, 0), "packed": packed}
        cluster.save_all([{"t": tensors, "a": arrays, **others}], step=1)
    return uri


def filled(uri: str, into: dict[str, Any]) -> dict[str, Any]:
    raystow.restore_latest(uri, into, strict=False, cast=True)
    return into


@pytest.mark.parametrize("source", ["t", "a"])
@pytest.mark.parametrize("saved", TORCH)
@pytest.mark.parametrize("wanted", TORCH)
def test_values_are_converted_to_the_dtype_of_the_target(uri: str, source: str, saved: str, wanted: str) -> None:
    tensor = filled(uri, {source: {saved: torch.full((2, 4), 9.0).to(TORCH[wanted])}})[source][saved]
    expected = NUMBERS.to(TORCH[saved]).to(TORCH[wanted])
    assert tensor.dtype == expected.dtype
    assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
    array = filled(uri, {source: {saved: np.full((2, 4), 9, NUMPY[wanted])}})[source][saved]
    assert array.dtype == NUMPY[wanted]
    assert np.array_equal(array.view(np.uint8), NUMBERS.numpy().astype(NUMPY[saved]).astype(NUMPY[wanted]).view(np.uint8))


def test_strided_and_empty_targets_are_filled(uri: str) -> None:
    turned, backwards = torch.zeros(4, 2, dtype=torch.float32).t(), np.zeros((2, 4), np.float32)[:, ::-1]
    into = filled(
        uri, {"t": {"double": turned}, "a": {"double": backwards}, "point": np.zeros((), np.float16), "none": np.zeros((2, 0))}
    )
    assert torch.equal(turned, NUMBERS.float())
    assert np.array_equal(backwards, NUMBERS.float().numpy())
    assert into["point"][()] == 2.5


def test_without_cast_the_error_names_both_dtypes(uri: str) -> None:
    kept = torch.full((2, 4), 9.0)
    with pytest.raises(raystow.StateError, match=r'into\["t"\]\["half"\]: is float32 .*holds bfloat16 .*cast=True converts'):
        raystow.restore_latest(uri, {"t": {"half": kept}}, strict=False)
    assert (kept == 9).all()


def test_another_shape_is_an_error_even_with_cast(uri: str) -> None:
    with pytest.raises(raystow.StateError, match=r"is float32 \(4, 2\), but version 1 holds bfloat16 \(2, 4\)$"):
        filled(uri, {"t": {"half": torch.zeros(4, 2)}})


@pytest.mark.parametrize("target", [torch.zeros(4), np.zeros(4, np.float32)], ids=["torch", "numpy"])
def test_an_unsupported_conversion_names_the_tensor(uri: str, target: Any) -> None:
    with pytest.raises(raystow.StateError, match=r'into\["packed"\]: float4_e2m1fn_x2 is not converted to float32'):
        filled(uri, {"packed": target})


def test_missing_and_extra_names_are_reported_together(uri: str, tmp_path: Path) -> None:
    with pytest.raises(raystow.StateError) as error:
        raystow.restore_latest(uri, {"t": {"half": torch.zeros(2, 4), "new": torch.zeros(1)}}, cast=True)
    assert "in `into` but not saved: t.new; saved but not in `into`: a.double, a.eighth, " in str(error.value)
