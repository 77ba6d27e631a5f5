"""Decoding by the instructions for a lane is exact for whole and partial chunks, derived tensors, deltas, and chains of
deltas.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import host_lane
from helpers.builders import memory_repository, rows_and_pack, whole, write, write_rows
from helpers.packs import flip, pack_key
from msgspec.structs import replace

from raystow.storage.coding.derived import Derivation, derive
from raystow.storage.coding.digest import raw_digest
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Damaged
from raystow.storage.format.boxes import Box
from raystow.storage.versions.reader import Request
from raystow.storage.versions.runs import ByteRun
from raystow.storage.versions.version import Version
from raystow.workers.gpu.decode import lane_plan

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def read(version: Version, boxes: dict[str, Box]) -> dict[str, bytes]:
    """Return the bytes of each box."""
    requests = []
    for name, box in boxes.items():
        rows = version.chunks[name]
        size = np.dtype(rows[0].dtype).itemsize
        requests.append(Request(name, rows, box, torch.zeros(box[1], dtype=WORDS[size])))
    done = host_lane.fill(version.reader(), requests)
    wanted = [row.nbytes for request in requests for row in request.chunks]
    assert sorted(done) == sorted(wanted)
    return {request.name: request.target.numpy().tobytes() for request in requests}


def states(count: int) -> list[dict[str, np.ndarray]]:
    """Return ``count`` states: tensors of each word width that change a little from one state to the next."""
    random = np.random.default_rng(3)
    state = {f"u{width}": random.integers(0, 200, 40_000 // width).astype(f"u{width}") for width in (1, 2, 4, 8)}
    state |= {"f4": random.normal(size=(120, 90)).astype(np.float32), "f2": random.normal(size=20_000).astype(np.float16)}
    found = [state]
    while len(found) < count:
        state = {
            name: (a.view(f"u{a.itemsize}") + random.integers(0, 2, a.shape).astype(f"u{a.itemsize}")).view(a.dtype)
            for name, a in state.items()
        }
        found.append(state)
    return found


def test_delta_chains_of_every_word_width_are_decoded() -> None:
    committer, before = Committer(memory_repository(), "me"), None
    for i, state in enumerate(states(4)):
        version = write(committer, {name: whole(array) for name, array in state.items()}, base=(i, before) if before else None)
        before = state
        if i:
            assert {row.name for rows in version.chunks.values() for row in rows if row.coding.base == i} == set(state)
        assert read(version, {name: ((0,) * a.ndim, a.shape) for name, a in state.items()}) == {
            name: array.tobytes() for name, array in state.items()
        }
        part = read(version, {"f4": ((7, 3), (50, 60)), "u8": ((100,), (1000,))})
        assert part == {"f4": state["f4"][7:57, 3:63].tobytes(), "u8": state["u8"][100:1100].tobytes()}


def with_weights() -> tuple[Committer, list[Version], list[dict[str, np.ndarray]]]:
    """Return versions whose ``weights`` are derived from ``f4``. The second version is a delta to the first."""
    committer, versions, found, before = Committer(memory_repository(), "me"), list[Version](), states(2), None
    for i, state in enumerate(found):
        rows, pack = rows_and_pack({name: whole(a) for name, a in state.items()}, (i, before) if before else None)
        (own,) = (replace(row, kind="tensor") for row in rows if row.name == "f4")
        state["weights"] = derive(state["f4"].reshape(-1).view(np.uint8), "float32", "float16").view(np.float16).reshape(120, 90)
        digest = raw_digest(state["weights"].reshape(-1).view(np.uint8))
        weights = replace(own, name="weights", dtype="float16", derivation=Derivation("f4", "float32"), raw_digest=digest)
        rows = [own if row.name == "f4" else row for row in rows]
        versions.append(write_rows(committer, [*rows, weights], pack))
        before = {name: a for name, a in state.items() if name != "weights"}
    return committer, versions, found


@pytest.mark.parametrize("names", [["weights"], ["f4", "weights"], ["weights", "u1", "f4"]])
def test_a_tensor_derived_from_a_delta_is_decoded(names: list[str]) -> None:
    _, versions, found = with_weights()
    for version, state in zip(versions, found, strict=True):
        assert read(version, {name: ((0,) * state[name].ndim, state[name].shape) for name in names}) == {
            name: state[name].tobytes() for name in names
        }
        part = read(version, {name: ((5, 2), (100, 30)) for name in names if name != "u1"})
        assert part == {name: state[name][5:105, 2:32].tobytes() for name in part}


def test_a_damaged_base_is_named_with_the_dependent_version() -> None:
    committer, versions, found = with_weights()
    key = pack_key(versions[0], 0)
    at = len(flip(committer.catalog, key)) // 2
    rows = [row for same in versions[0].chunks.values() for row in same]
    (name,) = (row.name for row in rows if row.start <= at < row.start + row.stored)
    needs = f"{name!r}, bytes .* not match.*; {name!r} of version 2 is a delta to it"
    with pytest.raises(Damaged, match=needs) as raised:
        read(versions[1], {name: ((0,) * found[1][name].ndim, found[1][name].shape)})
    assert raised.value.subject == key


def test_a_digest_mismatch_names_the_tensor() -> None:
    _, versions, found = with_weights()
    rows = versions[1].chunks["u4"]
    rows[0] = replace(rows[0], raw_digest=rows[0].raw_digest ^ 1)
    with pytest.raises(Damaged, match=r"tensor 'u4', bytes .* decoded bytes do not match"):
        read(versions[1], {"u4": ((0,), found[1]["u4"].shape)})
    base = versions[1].bases.version(1)
    known = base.chunk("u8", rows_box := ((0,), found[1]["u8"].shape), near=0)
    assert known is not None
    base.manifest._boxes[0]["u8", rows_box] = replace(known, raw_digest=known.raw_digest ^ 1)
    with pytest.raises(Damaged, match=r"'u8', bytes .* decoded bytes do not match .*'u8' of version 2 is a delta to it"):
        read(versions[1], {"u8": rows_box})


def test_chunks_without_a_kernel_are_left_to_the_host() -> None:
    """Such chunks are a derived delta base, a delta that was stored as plain bytes, and planes with another codec."""
    _, versions, _ = with_weights()
    (f4,) = versions[1].chunks["f4"]
    plain = replace(f4, coding=replace(f4.coding, planes=False, codecs=("raw",), stored=(f4.decoded,), streams=b""))
    halves = replace(f4.coding, codecs=f4.coding.codecs[:2], stored=f4.coding.stored[:2])
    stray = replace(f4, name="weights", dtype="float16", coding=halves)
    new = replace(f4, coding=replace(f4.coding, codecs=("complement",) * 4))
    reader = versions[1].reader()
    for row, left in ((f4, 0), (plain, 1), (stray, 1), (new, 1)):
        target = torch.zeros(row.extent, dtype=WORDS[np.dtype(row.dtype).itemsize])
        others = list[ByteRun]()
        plans = list(lane_plan.plan(reader.runs([Request(row.name, [row], row.box, target)]), others))
        assert (len(plans), len(others)) == (1 - left, left)
