"""The kernels of stored digests, in Triton's interpreter: whole objects, and objects in parts, at every alignment."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.replaced_parts import replace_parts

from raystow.storage.coding.digest import stored_digest
from raystow.workers.gpu import kernel_args
from raystow.workers.gpu.kernels import blake3_kernels

PARTS = [(1024,), (1025,), (2048, 5), (2048, 1024, 1023)]
"""Bytes of the parts of each object; all but the last are whole leaves."""
REMAINDERS = (0, 5, 10, 15, 3, 12, 6)
"""Of the address of each part, by sixteen."""


pytestmark = pytest.mark.usefixtures("interpreted")


def test_digests_of_objects_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_parts(monkeypatch, [(kernel_args, "MOST_ROWS", 3)])
    memory = np.random.default_rng(0).integers(0, 256, 32 << 10, np.uint8)
    start = -memory.ctypes.data % 16
    rows, objects, wanted = list[tuple[int, ...]](), list[tuple[int, ...]](), list[bytes]()
    first = 0
    for sizes in PARTS:
        whole, before = b"", 0
        for size in sizes:
            at = start + REMAINDERS[len(rows)]
            rows.append((memory.ctypes.data + at, size, first + before, before))
            whole += memory[at : at + size].tobytes()
            start += size // 16 * 16 + 32
            before += blake3_kernels.leaf_count(size)
        objects.append((0, len(whole), first, 0))
        wanted.append(stored_digest(whole))
        first += before
    values, others = (torch.zeros(8 * first, dtype=torch.uint32) for _ in range(2))
    found = torch.zeros((len(PARTS), 8), dtype=torch.uint32)
    blake3_kernels.leaves(torch.tensor(rows), max(size for _, size, _, _ in rows), values)
    blake3_kernels.tree(torch.tensor(objects), values, others, found)
    assert [digest.numpy().tobytes() for digest in found] == wanted
