"""Every supported value of a state is saved and restored bit for bit, through the whole save path and into live state."""

from __future__ import annotations

import collections
import math
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.local_cluster import LocalCluster

import raystow
from raystow.state.shards import bits
from raystow.storage.coding.dtypes import DTYPES
from raystow.storage.versions.version import Version

DTYPES_OF_TORCH = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.quint"))
    },
    key=str,
)


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return random bits, including NaN payloads; bools are 0 or 1."""
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same_bits(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a).tobytes() == bits(b).tobytes()


def test_the_format_has_every_dtype_of_torch() -> None:
    assert {str(dtype).removeprefix("torch.") for dtype in DTYPES_OF_TORCH} <= set(DTYPES)


@pytest.mark.parametrize("dtype", DTYPES_OF_TORCH, ids=str)
def test_every_dtype_of_torch_is_restored(dtype: torch.dtype) -> None:
    base = random_tensor(dtype, 64, 48)
    state = {
        "plain": base,
        "empty": random_tensor(dtype, 0, 3),
        "scalar": random_tensor(dtype),
        "one": random_tensor(dtype, 1),
        "odd": random_tensor(dtype, 1031),
        "transposed": base.t(),
        "strided": base[::3, 5:40:2],
        "expanded": base[:1].expand(7, 48),
    }
    with LocalCluster(f"memory://dtype-{dtype}") as cluster:
        version = cluster.save(state, step=1)
    into = {name: random_tensor(dtype, *tensor.shape) for name, tensor in state.items()}
    into["transposed"] = random_tensor(dtype, 64, 48).t()
    assert raystow.restore_latest(cluster.uri, into=into) == version
    for name, tensor in state.items():
        assert same_bits(into[name], tensor), name
        assert same_bits(version.read(name), tensor), name


def test_conjugated_and_negated_views_are_resolved() -> None:
    z = torch.randn(5, 3, dtype=torch.complex64)
    with LocalCluster("memory://conj") as cluster:
        version = cluster.save({"conj": z.conj(), "neg": z.conj().imag}, step=1)
    assert torch.equal(version.read("conj"), z.conj().resolve_conj())
    assert torch.equal(version.read("neg"), -z.imag)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conjugated_and_negated_targets_get_the_saved_values(dtype: torch.dtype) -> None:
    saved = {"z": torch.randn(5, 3, dtype=dtype), "part": torch.randn(5, 3, dtype=dtype.to_real()), "wide": torch.randn(5, 3)}
    saved["z"][1, :2] = torch.tensor([complex(-0.0, math.inf), complex(math.nan, -0.0)])
    saved["part"][1, :2] = torch.tensor([-0.0, -math.inf])
    with LocalCluster(f"memory://conj-targets-{dtype}") as cluster:
        cluster.save(saved, step=1)
    z = torch.nn.Parameter(torch.zeros(5, 3, dtype=dtype).conj(), requires_grad=False)
    part = torch.zeros(5, 3, dtype=dtype).conj().imag
    assert z.is_conj()
    assert part.is_neg()
    raystow.restore_latest(cluster.uri, into={"z": z, "part": part, "wide": torch.zeros(3, 5).T})
    assert same_bits(z.resolve_conj(), saved["z"])
    assert same_bits(part.resolve_neg(), saved["part"])
    raystow.restore_latest(
        cluster.uri, into={"wide": part, "part": torch.zeros(5, 3), "z": torch.zeros(5, 3).cfloat()}, cast=True
    )
    assert torch.equal(part.resolve_neg(), saved["wide"].to(part.dtype))


def test_plain_values_and_containers_are_restored() -> None:
    payload = struct.unpack(">d", bytes.fromhex("7ff8dead0000beef"))[0]
    point = collections.namedtuple("point", "x y")
    state = {
        "numbers": [
            0,
            -1,
            1 << 200,
            -(1 << 63),
            True,
            False,
            None,
            1.5,
            -0.0,
            math.inf,
            payload,
            3 + 4j,
            complex(math.nan, -0.0),
        ],
        "texts": ("", "ünïcode \ud800", "with.dots", b"", b"\x00\xff" * 100),
        7: {-3: "integer keys", "": "empty key"},
        "nested": [({"a": [1, (2, [3])]},), point(1, [2.5])],
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "ordered": collections.OrderedDict(b=1, a=2),
    }
    with LocalCluster("memory://values") as cluster:
        cluster.save(state, step=1)
    blank = {
        "numbers": [None] * 13,
        "texts": (None,) * 5,
        7: {-3: None, "": None},
        "nested": [({"a": [None, (None, [None])]},), point(None, [None])],
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "ordered": collections.OrderedDict(b=None, a=None),
    }
    inner = blank["nested"][0][0]["a"]
    raystow.restore_latest(cluster.uri, into=blank)
    assert repr(blank) == repr(state)
    assert struct.pack(">d", blank["numbers"][10]).hex() == "7ff8dead0000beef"
    assert blank["nested"][0][0]["a"] is inner  # lists and dicts are filled in place
    assert isinstance(blank["nested"][1], point)


def test_numpy_arrays_and_scalars_are_restored() -> None:
    state = {
        "array": np.arange(1000, dtype=np.uint16).reshape(10, 100)[:, ::7],
        "scalar": np.float32(1.25),
        "wide": np.float64(2.5),
        "zero_d": np.array(7, dtype=np.int8),
        "bool": np.array([True, False]),
    }
    with LocalCluster("memory://numpy") as cluster:
        version = cluster.save(state, step=1)
    array = np.zeros((10, 15), np.uint16)
    into: dict[str, Any] = {"array": array, "scalar": None, "wide": np.float64(0), "zero_d": np.zeros((), np.int8), "bool": None}
    raystow.restore_latest(cluster.uri, into=into)
    assert into["array"] is array
    for name, value in state.items():
        assert type(into[name]) is type(value)
        assert np.array_equal(into[name], value)
        assert into[name].dtype == value.dtype
        assert type(version.read(name)) is type(value)
    with pytest.raises(raystow.StateError, match=r'state\["when"\]: numpy dtype datetime64'):
        cluster.save({"when": np.array(["2020-01-01"], "datetime64[D]")}, step=2)


def test_a_part_of_a_tensor_is_read() -> None:
    wide = torch.randn(3, 5000, 700)
    with LocalCluster("memory://large") as cluster:
        version = cluster.save({"wide": wide, "long": torch.arange(3 << 20)}, step=1)
    assert len(version.chunks["wide"]) > 9
    assert torch.equal(version.read("wide", index=(1, slice(100, 4000, 3), slice(5, 9))), wide[1, 100:4000:3, 5:9])
    assert torch.equal(version.read("wide", index=(..., 699)), wide[..., 699])
    assert version.read("long", index=-1) == (3 << 20) - 1


def test_mismatches_are_reported_before_anything_changes(caplog: pytest.LogCaptureFixture) -> None:
    with LocalCluster("memory://mismatch") as cluster:
        cluster.save({"a": torch.ones(3), "b": torch.ones(2, 2), "n": 1}, step=1)
    into: dict[str, Any] = {"a": torch.zeros(3), "c": torch.zeros(1), "n": 0}
    with pytest.raises(raystow.StateError, match=r"in `into` but not saved: c; saved but not in `into`: b"):
        raystow.restore_latest(cluster.uri, into=into)
    assert into["a"].sum() == 0
    assert not caplog.records
    raystow.restore_latest(cluster.uri, into=into, strict=False)
    assert "in `into` but not saved: c; saved but not in `into`: b" in caplog.text
    assert into["a"].sum() == 3
    assert into["n"] == 1
    with pytest.raises(raystow.StateError, match=r'into\["b"\]: is float64 \(2, 2\), but version 1 holds float32 \(2, 2\)'):
        raystow.restore_latest(cluster.uri, into={"b": torch.zeros(2, 2, dtype=torch.float64)}, strict=False)
    frozen = np.ones(3, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(raystow.StateError, match="read-only"):
        raystow.restore_latest(cluster.uri, into={"a": frozen}, strict=False)


PLAIN = {
    "seven": 7,
    "tenth": 0.1,
    "flag": True,
    "big": 2**24 + 1,
    "huge": 2**70,
    "nan": math.nan,
    "i": 1j,
    "none": None,
    "text": "x",
}


@pytest.fixture(scope="module")
def plain() -> Version:
    with LocalCluster("memory://plain") as cluster:
        return cluster.save(PLAIN, step=1)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("seven", torch.zeros(())),
        ("seven", torch.zeros((), dtype=torch.bfloat16)),
        ("seven", torch.zeros((), dtype=torch.uint64)),
        ("seven", torch.zeros((), dtype=torch.float8_e4m3fn)),
        ("seven", torch.nn.Parameter(torch.zeros(()))),
        ("seven", np.zeros((), np.int8)),
        ("seven", np.zeros((), ml_dtypes.bfloat16)),
        ("seven", torch.zeros(2)[1]),
        ("tenth", torch.zeros((), dtype=torch.float64)),
        ("flag", torch.zeros((), dtype=torch.bool)),
        ("flag", np.zeros((), np.float32)),
        ("big", np.zeros((), np.int32)),
        ("huge", torch.zeros(())),
        ("nan", torch.zeros((), dtype=torch.complex64)),
        ("i", torch.zeros((), dtype=torch.complex64)),
        ("i", torch.zeros((), dtype=torch.complex64).conj()),
        ("i", np.zeros((), np.complex128)),
    ],
    ids=repr,
)
def test_a_tensor_gets_a_number_that_its_dtype_has(plain: Version, name: str, target: Any) -> None:
    into = {name: target}
    raystow.restore(plain, into, strict=False)
    assert into[name] is target
    got = target.item()
    assert got == PLAIN[name] or (got != got and PLAIN[name] != PLAIN[name])


@pytest.mark.parametrize(
    ("name", "target", "what"),
    [
        ("tenth", torch.zeros(()), r"is float32, which does not have the saved number 0.1 \(cast=True converts"),
        ("big", torch.zeros(()), "is float32, which does not have the saved number 16777217"),
        ("seven", torch.zeros((), dtype=torch.bool), "is bool, which does not have the saved number 7"),
        ("nan", np.zeros((), np.int64), "is int64, which does not have the saved number nan"),
        ("huge", torch.zeros((), dtype=torch.int64), "is int64, which does not have"),
        ("i", torch.zeros(()), "is float32, which does not have the saved number 1j"),
        ("seven", torch.zeros(1), r"is float32 \(1,\), but the version holds the number 7"),
        ("seven", np.zeros((2, 3)), r"is float64 \(2, 3\), but the version holds the number 7"),
        ("none", torch.zeros(()), r"is float32 \(\), but the version holds None"),
        ("text", np.zeros(()), r"is float64 \(\), but the version holds a str"),
    ],
)
def test_a_tensor_is_not_replaced_by_a_plain_value(plain: Version, name: str, target: Any, what: str) -> None:
    into = {"flag": False, name: target}
    with pytest.raises(raystow.StateError, match=rf'into\["{name}"\]: {what}'):
        raystow.restore(plain, into, strict=False)
    assert into[name] is target
    assert not into["flag"]
    assert not np.asarray(target).any()


def test_numbers_are_converted_with_cast(plain: Version) -> None:
    tenth, big, i = torch.zeros(()), np.zeros((), np.float32), torch.zeros((), dtype=torch.float64)
    raystow.restore(plain, {"tenth": tenth, "big": big, "i": i}, strict=False, cast=True)
    assert tenth == torch.tensor(0.1)
    assert big == 2**24
    assert i == 0
    with pytest.raises(raystow.StateError, match="the version holds None"):
        raystow.restore(plain, {"none": tenth}, strict=False, cast=True)


def test_a_number_is_replaced_by_the_number_of_a_saved_tensor() -> None:
    state = {
        "a": torch.tensor(7.5),
        "b": np.array(3, np.int16),
        "c": np.float32(0.5),
        "d": torch.tensor(True),
        "w": torch.ones(2),
    }
    with LocalCluster("memory://numbers") as cluster:
        version = cluster.save(state, step=1)
    into: dict[str, Any] = {"a": 0, "b": 0.0, "c": 1, "d": None, "w": None}
    raystow.restore(version, into)
    assert [type(into[name]) for name in "abcd"] == [float, int, float, torch.Tensor]
    assert (into["a"], into["b"], into["c"]) == (7.5, 3, 0.5)
    assert torch.equal(into["w"], torch.ones(2))
    for number in (0, 0.0, np.float64(0)):
        with pytest.raises(raystow.StateError, match=r'into\["w"\]: is a number, but the version holds float32 \(2,\)'):
            raystow.restore(version, {"w": number}, strict=False)


def freed() -> torch.Tensor:
    tensor = torch.ones(300)
    tensor.untyped_storage().resize_(0)
    return tensor


def deep(levels: int) -> Any:
    state: Any = torch.ones(1)
    for _ in range(levels):
        state = {"x": state}
    return state


UNSUITABLE = {
    "freed": (freed, "tensors whose memory was freed cannot be stored"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensors cannot be stored"),
    "not made yet": (lambda: torch.nn.LazyLinear(3).weight, "uninitialized tensors cannot be stored"),
    "masked": (lambda: np.ma.masked_equal([1, 2, 3], 2), "arrays of class MaskedArray cannot be stored"),
    "deep": (lambda: deep(3000), "is nested more than 100 deep"),
}


@pytest.mark.parametrize("name", UNSUITABLE)
def test_unsupported_values_are_refused_with_their_path(name: str) -> None:
    """They are refused before and after the first save."""
    make, what = UNSUITABLE[name]
    with LocalCluster(f"memory://unsuitable-{name.replace(' ', '-')}") as cluster:
        for _ in range(2):
            with pytest.raises(raystow.StateError, match=rf'state\["a"\].*{what}'):
                cluster.save({"a": make()}, step=1)
            cluster.save({"a": torch.ones(300)}, step=1)
    with pytest.raises(raystow.StateError, match=rf'into\["a"\].*{what}'):
        raystow.restore_latest(cluster.uri, into={"a": make()})


@pytest.mark.parametrize(
    "target",
    [
        lambda: torch.zeros(1, 64).expand(16, 64),
        lambda: torch.zeros(80).as_strided((16, 64), (1, 1)),
        lambda: np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), (16, 64), (0, 4)),
    ],
    ids=["expanded", "overlapping", "array"],
)
def test_targets_whose_elements_share_memory_are_refused(target: Any) -> None:
    with LocalCluster("memory://shared") as cluster:
        cluster.save({"a": torch.randn(16, 64)}, step=1)
    with pytest.raises(raystow.StateError, match=r'into\["a"\]: elements share memory'):
        raystow.restore_latest(cluster.uri, into={"a": target()})


def test_all_kinds_of_views_are_restored_in_place() -> None:
    with LocalCluster("memory://views") as cluster:
        cluster.save({"a": torch.randn(16, 64)}, step=1)
    whole = cluster.repository.versions()[-1].read("a")
    memory = np.zeros((16, 64), np.float32)
    targets = (torch.zeros(64, 16).T, torch.zeros(32, 128)[::2, ::2], torch.zeros(16, 1, 64)[:, 0], memory[::-1, ::-1])
    for target in targets:
        raystow.restore_latest(cluster.uri, into={"a": target})
        assert np.array_equal(np.asarray(target), np.asarray(whole))


def test_empty_containers_keep_their_types() -> None:
    with LocalCluster("memory://empty-containers") as cluster:
        cluster.save({"d": {}, "l": [], "t": (), "n": {}}, step=1)
    ordered, listed = collections.OrderedDict[str, Any](), list[Any]()
    into: dict[str, Any] = {"d": ordered, "l": listed, "t": (), "n": None}
    raystow.restore_latest(cluster.uri, into=into)
    assert into["d"] is ordered
    assert into["l"] is listed
    assert into == {"d": {}, "l": [], "t": (), "n": {}}


def test_restore_returns_none_only_for_an_empty_repository(tmp_path: Path) -> None:
    with LocalCluster(str(tmp_path / "empty")):
        pass
    state = {"a": torch.ones(1)}
    assert raystow.restore_latest(tmp_path / "empty", into=state) is None
    with pytest.raises(raystow.NotARepository):
        raystow.open(tmp_path / "nothing")


def test_each_rank_restores_its_own_values() -> None:
    states = [{"rank": rank, "same": "text", "w": torch.ones(4)} for rank in range(3)]
    with LocalCluster("memory://ranks", nodes=2) as cluster:
        version = cluster.save_all(states, step=1)
    assert [version.values(rank) for rank in range(4)] == [{"rank": r, "same": "text"} for r in (0, 1, 2, 0)]
    with pytest.raises(raystow.StateError, match="rank is -1"):
        version.values(-1)
    assert sum(len(fragment.values) for fragment in version.fragments) == 3 + 2  # one row for each value of a node


def test_a_node_with_another_folder_is_refused(tmp_path: Path) -> None:
    with LocalCluster(str(tmp_path / "run")) as cluster:
        (tmp_path / "run").rename(tmp_path / "away")  # simulates a node without the shared folder
        with pytest.raises(raystow.SaveFailed, match="this node sees another folder there than the coordinator"):
            cluster.save({"w": torch.ones(3)}, step=1)
        (tmp_path / "away").rename(tmp_path / "run")
        cluster.save({"w": torch.ones(3)}, step=2)
    assert [version.step for version in raystow.open(tmp_path / "run").versions()] == [2]
