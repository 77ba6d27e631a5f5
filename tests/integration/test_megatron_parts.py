"""Parts of ``raystow.megatron`` without processes: flat ranges as boxes, and objects as texts."""

from __future__ import annotations

import functools
import io
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray.cluster_utils import Cluster

import raystow

pytest.importorskip("megatron.core", reason="make test-frameworks installs Megatron-Core in an environment of its own")

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.enums import AttnBackend

from raystow.integrations.megatron import checkpoint_folder, plain_objects
from raystow.integrations.megatron.async_saves import AsyncSave, AsyncSaves
from raystow.integrations.megatron.flat_range import FlatRange
from raystow.state import value_text


def chunks(pieces: int, dim: int) -> Any:
    """Build a tensor for each chunk of a parameter, under names of their own."""

    def build(key: str, data: torch.Tensor, replica: Any, flat: Any) -> list[ShardedTensor]:
        parts = torch.chunk(data, pieces, dim)
        return [ShardedTensor.from_rank_offsets(f"{key}.{n}", part, replica_id=replica) for n, part in enumerate(parts)]

    return build


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    pieces=st.integers(1, 3),
    dim=st.integers(0, 2),
    ends=st.tuples(st.integers(0, 125), st.integers(0, 125)),
)
def test_the_boxes_of_a_range_contain_each_element_once(shape: list[int], pieces: int, dim: int, ends: tuple[int, int]) -> None:
    weights = torch.arange(np.prod(shape).item(), dtype=torch.float32).view(shape)
    start, stop = sorted(min(end, weights.numel()) for end in ends)
    built = chunks(pieces, dim % len(shape))
    factory = ShardedTensorFactory("w", weights, built, torch.cat, 0)
    state = weights.flatten()[start:stop].clone() + 1000  # the optimizer's state of each element
    found = {}
    for tensor, (offset, extent), local in FlatRange("m.w", state, (0, 0, 0), factory, start).parts():
        assert tuple(local.shape) == extent
        whole = dict(zip([f"m.w.{n}" for n in range(pieces)], torch.chunk(weights, pieces, dim % len(shape)), strict=False))
        box = whole[tensor.key][tuple(slice(low, low + size) for low, size in zip(offset, extent, strict=True))]
        for element, value in zip(box.flatten().tolist(), local.flatten().tolist(), strict=True):
            assert value == element + 1000
            assert element not in found
            found[element] = value
    assert sorted(found) == list(range(start, stop))


def test_a_parameter_that_is_stored_as_a_copy_is_refused() -> None:
    weights = torch.zeros(4, 4)

    def build(key: str, data: torch.Tensor, replica: Any, flat: Any) -> list[ShardedTensor]:
        return [ShardedTensor.from_rank_offsets(key, data.T.contiguous(), replica_id=replica)]

    factory = ShardedTensorFactory("w", weights, build, torch.cat, 0)
    with pytest.raises(raystow.StateError, match=r"no view of the parameter.*let its ShardedTensorFactory build views"):
        list(FlatRange("m.w", torch.zeros(3), (0, 0, 0), factory, 2).parts())


def test_objects_of_megatron_are_restored() -> None:
    args = Namespace(params_dtype=torch.bfloat16, attention_backend=AttnBackend.unfused, betas=(0.9, 0.95), path=None)
    state = {"args": args, 3: SimpleNamespace(a=[1, {2: "x"}]), "extra": io.BytesIO(b"opaque"), "rng": np.random.get_state()}
    restored = plain_objects.decode(plain_objects.encode(state, "state"))
    assert restored["args"] == args
    assert restored[3] == state[3]
    assert restored["extra"].getvalue() == b"opaque"
    assert (restored["rng"][1] == state["rng"][1]).all()


def test_objects_of_other_classes_are_refused() -> None:
    with pytest.raises(raystow.StateError, match=r"common_state.*args.*Opaque.*cannot be stored"):
        plain_objects.encode({"args": type("Opaque", (), {})()}, "common_state")
    text = value_text.dumps({"\0": ("object", "subprocess.Popen", {"args": "true"})})
    with pytest.raises(raystow.Damaged, match="an object of Megatron that this release does not know"):
        plain_objects.decode(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))


@dataclass
class SaveInFlight:
    """What ``AsyncSaves`` asks of a ``Pending``."""

    step: int
    outcome: Exception | None = None
    ended: bool = False

    def done(self) -> bool:
        return self.ended

    def result(self) -> None:
        self.ended = True
        if self.outcome is not None:
            raise self.outcome


def test_a_tracker_is_written_after_the_commit_only() -> None:
    saves, written = AsyncSaves(), list[int]()
    in_flight = [SaveInFlight(1, raystow.SaveFailed("the store does not answer")), SaveInFlight(2), SaveInFlight(3)]
    for one in in_flight:
        save = AsyncSave(cast("raystow.Pending", one))
        save.add_finalize_fn(functools.partial(written.append, one.step))
        saves.schedule_async_request(save)
    saves.maybe_finalize_async_calls()
    assert not written
    in_flight[0].ended = in_flight[1].ended = True
    saves.maybe_finalize_async_calls()
    assert written == [2]
    saves.maybe_finalize_async_calls(blocking=True)
    assert written == [2, 3]
    assert saves.get_num_unfinalized_calls() == 0
    saves.close()  # only the newest save counts


def test_the_end_of_training_raises_why_the_last_save_failed() -> None:
    saves = AsyncSaves()
    for one in SaveInFlight(1), SaveInFlight(2, raystow.SaveFailed("the store does not answer")):
        saves.schedule_async_request(AsyncSave(cast("raystow.Pending", one)))
    saves.maybe_finalize_async_calls(blocking=True)
    with pytest.raises(raystow.SaveFailed, match="the store does not answer"):
        saves.close()


def test_a_folder_names_versions_and_newer_saves_of_megatron(cluster: Cluster, tmp_path: Path) -> None:
    uri, folder = str(tmp_path / "run"), tmp_path / "checkpoints"
    tracker = folder / "latest_checkpointed_iteration.txt"
    with raystow.Checkpointer(uri) as checkpointer:
        for name, step in [("checkpoints", 2), ("checkpoints", 4), ("another", 2)]:
            place = checkpoint_folder.place_of(tmp_path / name / f"iter_{step:07d}")
            checkpointer.save({"w": torch.ones(2)}, step=step, metrics={checkpoint_folder.METRIC: place}).result()
    checkpoint_folder.complete(folder, uri, 2)
    assert tracker.read_text() == "4"
    found = {path.name: checkpoint_folder.pointer_in(path) for path in folder.iterdir() if path.is_dir()}
    steps = {name: (pointer.open().step, pointer.version) for name, pointer in found.items() if pointer is not None}
    assert steps == {"iter_0000002": (2, 1), "iter_0000004": (4, 2)}, "another folder has saved step 2, too"
    newer = folder / "iter_0000008"
    newer.mkdir()
    (newer / "metadata.json").write_text("{}")
    for text in "8", "4":  # Megatron has saved 8 without raystow; its tracker decides
        tracker.write_text(text)
        checkpoint_folder.complete(folder, uri)
        assert tracker.read_text() == text
    tracker.write_text("6")  # of a version that was rolled back
    checkpoint_folder.complete(folder, uri)
    assert tracker.read_text() == "4"
