"""Versions of which some are deltas to another version."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from helpers.builders import rows_and_pack, write_rows
from helpers.training_versions import halves
from raystow.storage.coding.derived import Derivation
from raystow.storage.commit.committer import Committer
from raystow.storage.format.manifest import TENSOR
from raystow.storage.versions.version import Version

WORDS = np.random.default_rng(1).integers(0, 1 << 30, (4, 20000), np.int32)


def star(committer: Committer) -> list[dict[str, np.ndarray]]:
    """Commit a whole version, two deltas to it, and another whole version. Each version has weights derived from its master
    weights. Return the arrays of each version.
    """
    arrays = [{"optimizer.step": WORDS + i, "model.ids": WORDS[:1] * 3 + i} for i in range(4)]
    for i, one in enumerate(arrays):
        base = (1, arrays[0]) if i in (1, 2) else None
        rows, pack = rows_and_pack({name: halves(array) for name, array in one.items()}, base)
        rows = [replace(row, kind=TENSOR) for row in rows]
        for row in rows[:2]:
            derived = Derivation(row.name, row.dtype)
            rows.append(replace(row, name="model.step", path='["model", "step"]', derivation=derived))
        assert write_rows(committer, rows, pack).entry.bases == ((1,) if base else ())
    return arrays


def as_it_was(version: Version, arrays: list[dict[str, np.ndarray]]) -> bool:
    one = arrays[version.id - 1]
    wanted = {"model.ids": one["model.ids"], "model.step": one["optimizer.step"]}
    if version.resumable:
        wanted |= {"optimizer.step": one["optimizer.step"]}
    return version.tensors().keys() == wanted.keys() and all(
        np.array_equal(np.asarray(version.read(name)), array) for name, array in wanted.items()
    )
