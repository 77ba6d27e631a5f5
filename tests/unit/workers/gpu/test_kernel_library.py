"""The compiled kernels match their sources, each GPU gets matching binaries, and no launch exceeds CUDA's limits of a grid."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.builders import memory_repository, whole, write
from helpers.replaced_parts import replace_parts

from raystow.orchestrator.restore.fill import fill_on_gpu
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Unsupported
from raystow.storage.versions.reader import Request
from raystow.workers.gpu.kernels import bfloat16_kernels, blake3_kernels, copy_kernels, library, word_kernels
from raystow.workers.gpu.kernels.constants import NARROW
from raystow.workers.gpu.kernels.library import PTX, SHIPPED, Architecture, Binary, Kernel, sources_digest, variant_name
from raystow.workers.gpu.kernels.sources.variants import variants


@pytest.mark.parametrize("name", SHIPPED)
def test_binaries_are_made_from_the_sources(name: str) -> None:
    architecture = Architecture(name)
    assert architecture.sources == sources_digest(), "the sources have changed: run make kernels"
    assert architecture.names() == {variant_name(variant.name, variant.constants) for variant in variants()}
    for variant in variants():
        binary = architecture.binary(variant_name(variant.name, variant.constants))
        assert len(binary.arguments) == len(variant.arguments)
        assert binary.image.startswith(b"//\n" if name == PTX else b"\x7fELF")


GPUS = {(8, 0): "sm_80", (8, 7): "sm_86", (9, 0): "sm_90", (10, 3): "sm_100", (12, 1): "sm_120", (11, 0): PTX, (13, 0): PTX}


def has_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Let torch report a GPU of this compute capability."""
    replace_parts(monkeypatch, [(torch.cuda, "get_device_capability", lambda device: capability)])


@pytest.mark.parametrize(("capability", "name"), GPUS.items())
def test_each_gpu_gets_its_binaries(capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpu(monkeypatch, capability)
    assert library.architecture.__wrapped__(0).name == name


def test_an_old_gpu_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver cannot compile the PTX for it, whatever its version."""
    has_gpu(monkeypatch, (7, 5))
    with pytest.raises(Unsupported, match=r"compute capability 7\.5") as raised:
        library.architecture.__wrapped__(0)
    assert 'Compression("cpu")' in str(raised.value.remedy)


def test_tensors_of_an_old_gpu_are_decoded_on_the_cpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Here the tensor is in host memory, which receives the same copy."""
    has_gpu(monkeypatch, (7, 5))
    numbers, target = np.arange(6, dtype=np.int32), torch.zeros(6, dtype=torch.int32)
    version = write(Committer(memory_repository(), "test"), {"t": whole(numbers)})
    requests = [Request("t", version.chunks["t"], ((0,), (6,)), target)]
    fill_on_gpu(version.reader(), 99, requests, [], lambda nbytes: None)
    assert target.tolist() == numbers.tolist()
    assert "decoding on the CPU" in caplog.text
    assert "compute capability 7.5" in caplog.text


def test_binaries_are_packed_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Binary("a.b X=1", "b", "*q", 128, 0, b"one"), Binary("a.c", "c", "", 64, 1 << 16, b"")]

    class File:
        def read_bytes(self) -> bytes:
            return library.pack("0" * 64, "compiler 1", made)

        def __truediv__(self, name: str) -> File:
            return self

    monkeypatch.setattr(library.resources, "files", lambda package: File())
    architecture = Architecture("any")
    assert [architecture.binary(one.name) for one in made] == made
    assert (architecture.sources, architecture.compiler) == ("0" * 64, "compiler 1")


GRID = 65_535
"""The most programs in the second dimension of a grid."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record the grid and the arguments of each launch."""
    made = list[tuple[Any, ...]]()

    def launch(kernel: Kernel, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        made.append((grid, *arguments))

    replace_parts(monkeypatch, [(Kernel, "launch", launch)])
    return made


NUMBERS = torch.zeros(2 * GRID + 1, dtype=torch.int64)
OF_MANY_ROWS: dict[str, tuple[int, Callable[[torch.Tensor], None]]] = {
    "digest": (10, lambda table: word_kernels.digest(table, 4096, width=4, packed=False, digests=NUMBERS[None])),
    "compare": (3, lambda table: word_kernels.compare(table, 4096, width=2, rounded="bfloat16", misses=NUMBERS)),
    "move": (3, lambda table: copy_kernels.move(table, 4096)),
    "unpack7": (3, lambda table: copy_kernels.unpack7(table, 4096)),
    "leaves": (4, lambda table: blake3_kernels.leaves(table, 4096, NUMBERS)),
}


@pytest.mark.parametrize("name", OF_MANY_ROWS)
def test_many_rows_take_several_launches(name: str, launches: list[tuple[Any, ...]]) -> None:
    columns, call = OF_MANY_ROWS[name]
    table = torch.zeros((len(NUMBERS), columns), dtype=torch.int64)
    call(table)
    found = [(grid[1], rows.data_ptr() - table.data_ptr()) for grid, rows, *_ in launches]
    assert found == [(GRID, 0), (GRID, 8 * columns * GRID), (1, 16 * columns * GRID)]
    if name in ("digest", "compare"):
        assert [results[-1].data_ptr() - NUMBERS.data_ptr() for results in launches] == [0, 8 * GRID, 16 * GRID]


def test_large_tensors_take_more_launches(launches: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat16_kernels, "_table", lambda tensors: tensors)
    size = (1 << 30) + 5
    bfloat16_kernels.narrow([torch.empty(size, device="meta"), torch.empty(7, device="meta")], 1.0)
    ranges = [(first, last) for _, _, _, first, last in launches]
    assert all(grid[1] == -(-(last - first) // NARROW["SPAN"]) <= GRID for grid, _, _, first, last in launches)
    assert ranges[0][0] == 0
    assert all(before[1] == first and last <= 2 * first for before, (first, last) in itertools.pairwise(ranges))
    assert ranges[-2][1] < size <= ranges[-1][1]
