"""Derived tensors: tensors that are rounded or exact copies of other tensors are found, and are not stored again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
import torch
from msgspec import structs

import raystow
from raystow.state.planner import Planner, SavePlan, plan_save
from raystow.storage.coding.derived import derivable, derive, followed
from raystow.storage.coding.digest import raw_digest
from raystow.storage.errors import Damaged, Unsupported
from raystow.storage.format.groups import OPTIMIZER, WEIGHTS
from raystow.storage.format.manifest import SCHEMA, Chunk, Derivation, Fragment, rows_of


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)


EDGES = [0.0, -0.0, 1.0, 3.4028235e38, 65504.0, 65520.0, 1e-45, 6e-8, 2.98e-8, 5.96e-8, float("inf"), -float("inf"), 1.00390625]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_derivation_rounds_all_numbers_like_torch(dtype: str) -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    words = torch.cat([bits[~bits.isnan()], torch.tensor(EDGES)])
    rounded = raw(words.to(getattr(torch, dtype)))
    assert np.array_equal(derive(raw(words), "float32", dtype), rounded)
    assert followed(rounded, raw(words), "float32", dtype) == raw_digest(rounded)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_changed_bit_or_a_nan_prevents_derivation(dtype: str) -> None:
    words = torch.randn(5000)
    rounded = words.to(getattr(torch, dtype))
    changed = raw(rounded).copy()
    changed[4321] ^= 1
    assert followed(changed, raw(words), "float32", dtype) is None
    words[77] = float("nan")
    assert followed(raw(words.to(getattr(torch, dtype))), raw(words), "float32", dtype) is None
    assert followed(raw(words), raw(words), "float32", "float32") == raw_digest(raw(words)), "an exact copy may have NaNs"


def test_derivable_accepts_known_pairs_of_dtypes_only() -> None:
    assert derivable("int8", "int8")
    assert not derivable("bfloat16", "float32")
    assert not derivable("float64", "float32")


def plan(state: dict[str, torch.Tensor], planner: Planner | None = None, save: int = 1, **who: int) -> SavePlan:
    return plan_save(state, **{"rank": 0, "world_size": 1, **who}, planner=planner, save=save)


def pairs(found: SavePlan) -> set[tuple[str, str]]:
    return {(follower.piece.name, follower.source.name) for follower in found.followers}


def mixed(layers: int = 3, size: int = 3000) -> dict[str, torch.Tensor]:
    """Return weights, their master copies, moments of the same size, and two names for one tensor."""
    master = [torch.randn(size) for _ in range(layers)]
    state = {f"model.{i}": words.bfloat16() for i, words in enumerate(master)}
    state |= {f"optimizer.master.{i}": words for i, words in enumerate(master)}
    state |= {f"optimizer.exp_avg.{i}": torch.randn(size) for i in range(layers)}
    return state | {"embedding": master[0].view(-1), "zeros.a": torch.zeros(size), "zeros.b": torch.zeros(size)}


def test_weights_derived_from_a_master_copy_are_found() -> None:
    """Copies of a tensor are found as well."""
    found = plan(mixed())
    assert pairs(found) == {*((f"model.{i}", f"optimizer.master.{i}") for i in range(3)), ("embedding", "optimizer.master.0")}
    assert all(follower.piece.box == follower.source.box for follower in found.followers)
    groups = {piece.name: piece.group for piece in found.pieces}
    assert groups["optimizer.master.1"] == WEIGHTS, "a read of the weights alone must find the source in this group"
    assert groups["optimizer.exp_avg.1"] == OPTIMIZER


def test_derived_tensors_share_one_source() -> None:
    master = torch.randn(3000)
    state = {"a": master.bfloat16(), "b": master.bfloat16(), "c": master, "d": master.clone()}
    assert pairs(plan(state)) == {("a", "c"), ("b", "c"), ("d", "c")}


def test_strided_and_small_tensors_are_stored_not_derived() -> None:
    words = torch.randn(80, 50)
    assert not pairs(plan({"a": words.T, "b": words.T.clone(), "c": torch.ones(9), "d": torch.ones(9)}))


def assert_whole(plans: Sequence[SavePlan], state: dict[str, torch.Tensor]) -> None:
    """The ranks store or derive each element of all tensors once."""
    pieces = [one for each in plans for one in (*each.pieces, *(follower.piece for follower in each.followers))]
    assert len({(piece.name, piece.box) for piece in pieces}) == len(pieces)
    for name, tensor in state.items():
        assert sum(piece.nbytes for piece in pieces if piece.name == name) == tensor.nbytes


def test_ranks_with_equal_states_store_each_box_once() -> None:
    """Of tensors that all ranks hold, only those in the same memory are derived."""
    state = mixed(size=3_000_000)
    plans = [plan(state, rank=rank, world_size=3) for rank in range(3)]
    assert_whole(plans, state)
    assert set.union(*map(pairs, plans)) == {("embedding", "optimizer.master.0")}
    for each in plans:
        assert {id(follower.source) for follower in each.followers} <= set(map(id, each.pieces))


def test_all_ranks_look_for_derived_tensors_in_the_same_saves() -> None:
    """A change of the structure of the state starts a search immediately."""
    planner, state = Planner(), mixed()
    broken, pair = {**state, "model.1": torch.randn(3000).bfloat16()}, ("model.1", "optimizer.master.1")

    def found(state: dict[str, torch.Tensor], save: int, *, staged: bool = True) -> set[tuple[str, str]]:
        made = plan(state, planner, save)
        held = pairs(made)
        if staged:
            made.find_derived()
            made.find_derived()  # a second call, as for a state on several devices
        made.release()
        return held

    assert pair in found(state, 1)
    assert pair in found(state, 2)
    assert pair in found(broken, 3), "not every save searches"
    assert pair in found(broken, 4), "the search after save 4 affects later saves only"
    assert pair not in found(broken, 5)
    assert pair not in found(state, 8, staged=False)
    assert pair in found(state, 9), "save 9 does the search that save 8 skipped"
    assert ("new", "optimizer.master.2") in found({**broken, "new": state["optimizer.master.2"]}, 10)


def test_a_search_without_changes_keeps_the_division() -> None:
    """A GPU would have to recompute the results that depend on the division."""
    planner, state, divisions = Planner(), mixed(), list[int]()
    kept = list[SavePlan]()
    for save in (1, 2, 3):
        made = plan(state, planner, save)
        divisions.append(id(made.division))
        made.find_derived()
        made.release()
        kept.append(made)  # keep the plan alive, so that no other division gets its id
    assert len({*divisions}) == 1


def test_a_tensor_that_differed_is_not_checked_again() -> None:
    """It is checked again if other ranks have the tensor, too."""
    state, pair = mixed(size=30_000), ("embedding", "optimizer.master.0")
    for world, left in ((1, False), (2, True)):
        planners = [Planner() for _ in range(world)]
        plans = [plan(state, planner, 2, rank=rank, world_size=world) for rank, planner in enumerate(planners)]
        ((rank, follower),) = [(i, one) for i, each in enumerate(plans) for one in each.followers if one.piece.name == pair[0]]
        plans[rank].not_derived(follower)
        assert (pair in pairs(plan(state, planners[rank], 3, rank=rank, world_size=world))) is left


def test_ranks_plan_alike_whatever_bits_they_hold() -> None:
    """A rank that has missed a broadcast stores what the others leave to it."""
    states = [mixed(size=3_000_000) for _ in range(2)]
    boxed = [{name: raystow.Box(one, (3_000_000,), (0,), (0, 1)) for name, one in state.items()} for state in states]
    for held, tied in ((states, {("embedding", "optimizer.master.0")}), (boxed, set())):
        held[1]["model.1"] = held[0]["model.2"]
        plans = [plan(state, rank=rank, world_size=2) for rank, state in enumerate(held)]
        assert_whole(plans, states[0])
        assert set.union(*map(pairs, plans)) == tied


def test_derived_rows_name_their_source_and_share_its_bytes() -> None:
    from helpers.builders import rows_and_pack, whole

    words = np.random.default_rng(0).standard_normal(5000, np.float32)
    (own,), _ = rows_and_pack({"master": whole(words)})
    fields = structs.asdict(own) | {"kind": "tensor"}
    rows = [
        Chunk(**fields),
        Chunk(**fields | {"name": "copy", "derivation": Derivation("master", "float32")}),
        Chunk(**fields | {"name": "weights", "dtype": "bfloat16", "derivation": Derivation("master", "float32")}),
    ]
    fragment = Fragment(0, tuple(rows), ())
    data = fragment.dump()
    loaded = Fragment.load(data, 0, "key")
    assert sorted(loaded.chunks, key=lambda row: row.name) == sorted(rows, key=lambda row: row.name)
    info = fragment.info(data, [0])
    assert (info.raw, info.stored) == (20_000 + 20_000 + 10_000, own.coding.size), "shared bytes count once"


@pytest.mark.parametrize(
    ("dtype", "transform", "value", "kind"),
    [
        ("bfloat16", ["rounded:float64", "rotl1", "planes"], "master", Unsupported),
        ("bfloat16", ["rounded:nonsense", "rotl1", "planes"], "master", Unsupported),
        ("float32", ["rounded:bfloat16", "rotl1", "planes"], "master", Unsupported),
        ("float32", ["copy", "copy", "planes"], "master", Unsupported),
        ("float32", ["planes", "copy"], "master", Unsupported),
        ("float32", ["copy", "planes"], None, Damaged),
    ],
)
def test_invalid_derivations_are_refused(dtype: str, transform: list[str], value: str | None, kind: type) -> None:
    row = {
        "name": "t",
        "path": '["t"]',
        "kind": "tensor",
        "value": value,
        "dtype": dtype,
        "shape": [2],
        "offset": [0],
        "extent": [2],
        "group": "weights",
        "pack": 0,
        "start": 0,
        "base": None,
        "transform": transform,
        "codecs": ["raw"] * 4,
        "stored": [2] * 4,
        "stream": 1,
        "streams": [],
        "raw_digest": 0,
        "stored_digest": bytes(32),
    }
    with pytest.raises(kind):
        Fragment.of(rows_of(pa.Table.from_pylist([row], SCHEMA)), 0)


def test_found_relations_are_reused_without_keeping_tensors() -> None:
    planner, state = Planner(), mixed()
    first = plan(state, planner, 2)
    parts = first.parts
    assert torch.equal(parts[None].pieces[0].shard.local, state[parts[None].pieces[0].name])
    first.release()
    assert all(piece.shard.local is None and piece.shard.leaf.value is None for piece in parts[None].pieces)
    later = {name: tensor.clone() for name, tensor in state.items()}
    second = plan(later, planner, 3)
    assert second.parts is parts
    out = np.empty(parts[None].pieces[1].nbytes, np.uint8)
    parts[None].pieces[1].copy(out)
    assert np.array_equal(out, raw(later[parts[None].pieces[1].name]))
    second.release()
    grown = {name: torch.randn(4000) for name in state}
    assert plan(grown, planner, 3).parts is not parts


def test_elements_of_an_unstaged_save_are_not_reused() -> None:
    planner, state = Planner(), mixed()
    plan(state, planner, 2).release()
    for seed in (1, 2):
        torch.manual_seed(seed)
        later = {name: torch.randn_like(tensor) if "exp_avg" in name else tensor for name, tensor in state.items()}
        (piece,) = [one for one in plan(later, planner, 3).pieces if one.name == "optimizer.exp_avg.1"]
        out = np.empty(piece.nbytes, np.uint8)
        piece.copy(out)  # without a call of release
        assert np.array_equal(out, raw(later[piece.name]))


def test_a_source_that_becomes_strided_is_no_longer_used() -> None:
    planner, words = Planner(), torch.randn(80, 60)
    state = {"weights": words.bfloat16(), "master": words}
    assert pairs(plan(state, planner, 2)) == {("weights", "master")}
    state["master"] = words.T.contiguous().T
    assert torch.equal(state["master"], words)
    assert not pairs(plan(state, planner, 3))
