"""Versions of a training run: weights that are derived from master weights and change a little between versions."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from helpers.builders import rows_and_pack, write_rows
from helpers.training_versions import bits, halves
from raystow.storage.coding.derived import Derivation, derive
from raystow.storage.coding.digest import raw_digest
from raystow.storage.commit.committer import Committer
from raystow.storage.format.manifest import TENSOR, Chunk
from raystow.storage.repository import Repository
from raystow.storage.versions.version import Version


def train(committer: Committer, count: int) -> list[dict[str, bytes]]:
    """Commit ``count`` versions. Return the bytes of the weights of each version."""
    random = np.random.default_rng(2)
    master = random.standard_normal((200, 200), np.float32)
    found = []
    for _ in range(count):
        master = (master * (1 + random.normal(0, 0.01, master.shape))).astype(np.float32)
        rows, pack = rows_and_pack({"optimizer.w": halves(master), "model.scale": halves(master[:2] * 3)})
        rows = [replace(row, kind=TENSOR) for row in rows]
        rows += [_rounded(row, part) for row, part in zip(rows[:2], (master[:100], master[100:]), strict=True)]
        found.append(weights(write_rows(committer, rows, pack)))
    return found


def weights(version: Version) -> dict[str, bytes]:
    return {name: data for name, data in bits(version).items() if name.startswith("model.")}


def bases(repository: Repository) -> list[tuple[int, ...]]:
    return [entry.bases for entry in repository.root().versions]


def _rounded(row: Chunk, part: np.ndarray) -> Chunk:
    made = derive(np.ascontiguousarray(part).reshape(-1).view(np.uint8), "float32", "bfloat16")
    derived = Derivation(row.name, row.dtype)
    return replace(row, name="model.w", path='["model", "w"]', dtype="bfloat16", raw_digest=raw_digest(made), derivation=derived)
