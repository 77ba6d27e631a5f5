"""The compiled kernels match their sources, and each GPU gets matching binaries."""

from __future__ import annotations

import pytest
import torch

from raystow.workers.gpu.kernels import library
from raystow.workers.gpu.kernels.library import PTX, Architecture, Binary, sources_digest, variant_name
from raystow.workers.gpu.kernels.sources.variants import variants

SHIPPED = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", PTX)


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


@pytest.mark.parametrize(("capability", "name"), GPUS.items())
def test_each_gpu_gets_its_binaries(capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert library.architecture.__wrapped__(0).name == name


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
