"""Versions for tests of thinning, and functions that read their content before and after."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from helpers.builders import Cut, empty_record, orphans, rows_and_pack, whole
from helpers.fake_clock import FakeClock
from raystow.storage.coding.derived import Derivation, derive
from raystow.storage.coding.digest import raw_digest
from raystow.storage.commit.committer import Committer
from raystow.storage.format import keys
from raystow.storage.format.manifest import TENSOR, Chunk, Fragment, Value, path_text
from raystow.storage.repository import Repository
from raystow.storage.retention import replacement
from raystow.storage.versions.version import Version

MASTER = np.random.default_rng(0).standard_normal((40, 25), np.float32)
NORM = np.array([np.nan, -0.0, 1.5, np.inf], np.float32)
NORM.view(np.uint32)[0] = 0x7FC0_1234  # a NaN with a payload


def halves(array: np.ndarray) -> Cut:
    rows = array.shape[0] // 2
    return array, [((0, 0), (rows, array.shape[1])), ((rows, 0), (array.shape[0] - rows, array.shape[1]))]


def follows(rows: Iterable[Chunk], name: str, dtype: str) -> list[Chunk]:
    """Return the rows of a tensor that is derived from the tensor of these rows."""
    return [
        structs.replace(
            row,
            name=name,
            path=path_text((name,)),
            kind=TENSOR,
            dtype=dtype,
            raw_digest=raw_digest(derive(part(row), "float32", dtype)),
            derivation=Derivation(row.name, "float32"),
        )
        for row in rows
    ]


def part(row: Chunk) -> np.ndarray:
    box = tuple(slice(o, o + e) for o, e in zip(row.offset, row.extent, strict=True))
    return np.ascontiguousarray(MASTER[box]).reshape(-1).view(np.uint8)


def mixed(committer: Committer, step: int, *, copy: bool = False) -> Version:
    """Commit a version of two nodes. It has weights under two names, which are rounded master weights; master weights in the
    same pack; and moments in another pack. With ``copy``, another tensor of the weights is a copy of the master weights.
    """
    record = replace(empty_record(committer, step), metrics={"loss": 1.0 / step}, world_size=2)
    infos = []
    for node in range(2):
        name, tail = ("optimizer.master", ".w"), f".{node}"
        rows, pack = rows_and_pack({"".join(name) + tail: halves(MASTER), "norm" + tail: whole(NORM)})
        rows = [structs.replace(row, kind=TENSOR) for row in rows]
        rows += follows(rows[:2], "model.w" + tail, "bfloat16") + follows(rows[:2], "model.tied" + tail, "bfloat16")
        rows += follows(rows[:2], "model.half" + tail, "float16")
        rows += follows(rows[:2], "ema.w" + tail, "float32") if copy else []
        moments, apart = rows_and_pack({"optimizer.exp_avg" + tail: whole(MASTER * step), "optimizer.none": whole(NORM[:0])})
        empty, _ = rows_and_pack({"empty.a" + tail: whole(NORM[:0]), "empty.b" + tail: whole(NORM[:0])})
        for group, data in (("weights", pack), ("optimizer", apart)):
            committer.catalog.store.put(keys.pack(record.id, record.attempt, node, group, 0), [data])
        moments = [structs.replace(row, group="optimizer") for row in moments[: 2 - node]]  # one empty tensor, in one fragment
        chunks = tuple(structs.replace(row, node=node) for row in [*rows, *empty, *moments])
        values = (
            Value("step", '["step"]', str(step), (node,)),
            Value("optimizer.lr", '["optimizer", "lr"]', "0.1", (node,)),
        )
        fragment = Fragment(node, chunks, values)
        data = fragment.dump()
        committer.catalog.store.put(keys.fragment(record.id, record.attempt, node), [data])
        infos.append(fragment.info(data, [node], stall=0.5))
    return committer.commit(replace(record, fragments=tuple(infos), packs=None))


def bits(version: Version) -> dict[str, bytes]:
    """Return the bytes of each tensor, and the values."""
    found: dict[str, Any] = {name: version.read(name) for name in version.tensors()}
    tensors = {name: np.asarray(t.view(_words(t)) if hasattr(t, "untyped_storage") else t).tobytes() for name, t in found.items()}
    return tensors | {name: repr(value).encode() for name, value in version.values().items()}


def _words(tensor: Any) -> Any:
    import torch

    return torch.uint8 if tensor.ndim else tensor.dtype


def weights(version: Version) -> dict[str, bytes]:
    return {name: data for name, data in bits(version).items() if not name.startswith("optimizer.")}


def thin(repository: Repository, id: int = 1, resumable: int = 2, **how: Any) -> bool:
    return replacement.plan(repository, repository.version(id).entry, replacement.thin(resumable)).execute(**how) is not None


def collect(repository: Repository, clock: FakeClock) -> None:
    clock.time += 2 * 3600
    repository.plan_collection().execute()
    assert orphans(repository) == []
    assert (repository.root().dropped, repository.root().rewrites) == ((), ())
