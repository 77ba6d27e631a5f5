"""What ``raystow.dcp.Reader`` fills, and what it refuses before it fills anything: the rules of the Checkpointer."""

from __future__ import annotations

import contextlib
import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.state_equality import same

import raystow
from integration.dcp_failures import failure
from integration.gloo import Ranks
from raystow.dcp import Reader, Writer

_CALLS = iter(range(1 << 30))


def refused(state: dict[str, Any], uri: str, what: str) -> None:
    """Check that ``load`` raises an error that matches ``what``, and changes nothing."""
    before = copy.deepcopy(state)
    error = failure(state, Reader(uri))
    assert isinstance(error, raystow.StateError)
    assert re.search(what, str(error)), error
    assert same(state, before)


def test_other_dtypes_are_refused_unless_cast(uri: str) -> None:
    dcp.save({"w": torch.arange(9.0), "n": torch.tensor([16777217]), "a": np.arange(3)}, storage_writer=Writer(uri), no_dist=True)
    refused({"w": torch.zeros(9).bfloat16()}, uri, r'state_dict\["w"\]: is bfloat16 \(9,\), .* holds float32 .*cast=True')
    refused({"w": torch.zeros(9), "n": torch.zeros(1)}, uri, r'state_dict\["n"\]: is float32 \(1,\), .* holds int64')
    refused({"w": torch.zeros(9), "a": torch.zeros(3)}, uri, r'state_dict\["a"\]: is float32 \(3,\), .* holds int64')
    into = {"w": torch.zeros(9, dtype=torch.bfloat16), "n": torch.zeros(1), "a": torch.ones(3)}
    dcp.load(into, storage_reader=Reader(uri, cast=True), no_dist=True)
    assert torch.equal(into["w"], torch.arange(9.0).bfloat16())
    assert into["n"] == 16777216
    assert into["a"].tolist() == [0, 1, 2]


def test_targets_that_share_memory_are_refused(uri: str) -> None:
    state = {"emb": torch.randn(400, 30), "head": torch.randn(400, 30), "w": torch.randn(3, 3), "n": 1, "m": 2}
    dcp.save(state, storage_writer=Writer(uri), no_dist=True)
    refused({"w": torch.zeros(3, 1).expand(3, 3)}, uri, r'state_dict\["w"\]: elements share memory')
    shared, buffer = torch.zeros(400, 30), torch.zeros(401, 30)
    refused({"emb": shared, "head": shared}, uri, r'state_dict\["head"\]: is the memory of state_dict\["emb"\]')
    refused({"emb": buffer[:400], "head": buffer[1:]}, uri, r'state_dict\["head"\]: shares memory with state_dict\["emb"\]')
    number = torch.zeros(())
    refused({"n": number, "m": number}, uri, "is the memory of")
    parts = {"emb": (wide := torch.zeros(400, 60))[:, ::2], "head": wide[:, 1::2]}
    dcp.load(parts, storage_reader=Reader(uri), no_dist=True)
    assert same(parts, {name: state[name] for name in parts})


def test_a_container_at_two_places_gets_no_two_values(uri: str) -> None:
    dcp.save({"a": {"n": 1, "m": 3}, "b": [{"n": 2, "m": 3}]}, storage_writer=Writer(uri), no_dist=True)
    both, equal = {"n": 0}, {"m": 0}
    refused({"a": both, "b": [both]}, uri, r'state_dict\["b"\]\[0\]\["n"\]: is in the same dict as state_dict\["a"\]\["n"\]')
    dcp.load({"a": equal, "b": [equal]}, storage_reader=Reader(uri), no_dist=True)
    assert equal == {"m": 3}


def test_tied_tensors_are_loaded(uri: str) -> None:
    weight = torch.randn(400, 30)
    dcp.save({"emb": weight, "head": weight}, storage_writer=Writer(uri), no_dist=True)
    target = torch.zeros(400, 30)
    dcp.load({"emb": target, "head": target}, storage_reader=Reader(uri), no_dist=True)
    assert torch.equal(target, weight)


def test_targets_are_filled_in_place(uri: str) -> None:
    """As by the Checkpointer: also conjugated ones, and where an array or a number was saved. DCP itself replaces arrays."""
    saved = {"z": torch.randn(3, dtype=torch.complex64), "a": np.arange(3), "t": np.arange(3.0), "n": 7, "f": 0.1, "o": None}
    dcp.save({"deep": saved}, storage_writer=Writer(uri), no_dist=True)
    into = {
        "z": torch.zeros(3).cfloat().conj(),
        "a": np.zeros(3),
        "t": torch.zeros(3).double(),
        "n": torch.zeros(()),
        "f": 0,
        "o": 0,
    }
    state = {"deep": dict(into)}
    dcp.load(state, storage_reader=Reader(uri), no_dist=True)
    assert all(state["deep"][name] is into[name] for name in "ztn")
    state["deep"]["z"] = into["z"].resolve_conj()
    assert same(state["deep"], {**saved, "t": torch.arange(3.0).double(), "n": torch.tensor(7.0)})
    refused({"deep": {"f": torch.zeros(())}}, uri, "is float32, which does not have the saved number 0.1")
    refused({"deep": {"o": torch.zeros(())}}, uri, "but the version holds None")
    refused({"deep": {"n": torch.zeros(1)}}, uri, r"is float32 \(1,\), but the version holds the number 7")


@pytest.mark.parametrize(
    "way", [torch.device, lambda name: contextlib.nullcontext(torch.set_default_device(name))], ids=["with", "set"]
)
def test_a_default_device_changes_nothing(uri: str, way: Any) -> None:
    state = {"w": torch.arange(6.0), "e": torch.empty(0, 2), "n": 7, "a": np.arange(3), "c": (torch.ones(2), torch.empty(0))}
    into = {**copy.deepcopy(state), "w": torch.zeros(6, dtype=torch.float64), "n": torch.zeros(())}
    also, kept = copy.deepcopy(into), copy.deepcopy({**into, "w": torch.arange(6.0).double(), "n": torch.tensor(7.0)})
    try:
        with way("meta"):
            dcp.save(state, storage_writer=Writer(uri), no_dist=True)
            dcp.load(into, storage_reader=Reader(uri, cast=True), no_dist=True)
            raystow.restore(uri, also, cast=True)
            read = {name: raystow.open(uri).latest().read(name) for name in state if name != "c"}
    finally:
        torch.set_default_device(None)
    assert same(into, kept), into
    assert same(also, kept), also
    assert same(read, {name: state[name] for name in read})


def load_by_rank(rank: int, n: int, uri: str, saves: bool) -> tuple[Any, ...]:
    """Save values that differ between ranks, and load them."""
    state = {"pos": 10 * rank, "same": "s", "list": [rank, {"seen": rank / 4}], "only": {f"r{rank}": rank}, "w": torch.ones(2)}
    if saves:
        dcp.save(state, storage_writer=Writer(uri))
    own = min(rank, 2)
    into = {"pos": -1, "same": "", "list": [-1, {"seen": -1}], "only": {f"r{own}": -1}, "w": torch.zeros(2)}
    into_also = copy.deepcopy(into)
    dcp.load(into, storage_reader=Reader(uri))
    raystow.restore(uri, into_also, strict=False)
    return state, into, into_also


def test_plain_values_are_those_of_each_rank(ranks: Ranks, uri: str) -> None:
    answers = ranks.call(3, load_by_rank, uri, True)
    for saved, loaded, restored in answers:
        assert same(loaded, saved), loaded
        assert same(restored, saved), restored
    (version,) = raystow.open(uri).versions()
    assert [version.values(rank)["pos"] for rank in range(4)] == [0, 10, 20, 0]
    rows = [(row.name, row.ranks) for fragment in version.fragments for row in fragment.values]
    assert ("same", (0, 1, 2)) in rows, "a value that all ranks have is stored once"
    assert len(rows) == 1 + 3 * 4
    raystow.open(uri).verify(version)
    _, loaded, _ = ranks.call(4, load_by_rank, uri, False)[3]
    assert loaded["pos"] == 0, "a further rank has those of the lowest one"


def fill_dtensors(rank: int, n: int, uri: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def placed(local: torch.Tensor, *placements: Any) -> DTensor:
        return DTensor.from_local(local, mesh, placements)

    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=(f"t{next(_CALLS)}",))
    mine = torch.arange(6.0).reshape(2, 3) + 10 * rank
    state = {
        "z": placed(mine.cfloat() * 1j, Shard(0)),
        "tied": placed(mine, Shard(0)),
        "other": placed(mine + 1, Shard(0)),
        "n": 7,
    }
    dcp.save({**state, "also": state["tied"], "n": 7}, storage_writer=Writer(uri))
    for load in (lambda into: dcp.load(into, storage_reader=Reader(uri)), lambda into: raystow.restore(uri, into, strict=False)):
        target = placed(torch.zeros(2, 3), Shard(0))
        into = {"z": placed(torch.zeros(2, 3).cfloat().conj(), Shard(0)), "tied": target, "also": target}
        into["n"] = placed(torch.zeros(()), Replicate())
        load(into)
        assert torch.equal(into["z"].to_local().resolve_conj(), mine.cfloat() * 1j)
        assert torch.equal(target.to_local(), mine)
        assert into["n"].to_local() == 7
        shared = torch.zeros(2, 3)
        with pytest.raises((raystow.StateError, dcp.api.CheckpointException), match=r'"(tied|other)"\].* memory '):
            load({"tied": placed(shared, Shard(0)), "other": placed(shared, Shard(0))})
        assert not shared.any()


def test_dtensors_are_filled_by_the_same_rules(ranks: Ranks, uri: str) -> None:
    ranks.call(2, fill_dtensors, uri)
