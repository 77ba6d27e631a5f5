"""The compiled loops of all machines return the same bytes, and so does numpy."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from raystow.storage.coding import digest, kernels, zstd
from raystow.storage.errors import Damaged

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="this machine does not run the compiled loops")


def test_the_library_was_built_from_the_current_source() -> None:
    source = hashlib.sha256(kernels.SOURCE.read_bytes()).hexdigest()
    built = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(kernels.library(), "source_digest")))
    assert built.decode() == source, "run: make byte-loops"
    assert all(source.encode() in library.read_bytes() for library in kernels.LIBRARIES.values()), "run: make byte-loops"


def test_the_loops_of_all_machines_return_the_same_bytes(tmp_path: Path) -> None:
    """Those of aarch64 run in an emulator of its processor."""
    compilers = {"x86_64": "gcc", "aarch64": "aarch64-linux-gnu-gcc"}
    emulator = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]
    if platform.machine() != "x86_64" or None in map(shutil.which, [*compilers.values(), emulator[0]]):
        pytest.skip("needs gcc, gcc-aarch64-linux-gnu and qemu-user on x86-64")
    printed = []
    for machine, compiler in compilers.items():
        program, source = tmp_path / machine, Path(__file__).parents[3] / "helpers" / "byte_loops_run.c"
        subprocess.run([compiler, "-O1", "-Wall", "-Werror", source, kernels.LIBRARIES[machine], "-o", program], check=True)
        command = [*(emulator if machine == "aarch64" else []), program]
        printed.append(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert printed[0] == printed[1]
    assert len(printed[0].splitlines()) == 7 * (12 + 8 + 7)


def results(seed: int, count: int) -> Iterator[bytes]:
    """Yield the result of each loop of a restore for random bytes."""
    random = np.random.default_rng(seed)
    for width in (2, 4, 8):
        planes = tuple(random.integers(0, 256, count, np.uint8) for _ in range(width))
        for rotated in (False, True):
            words = np.zeros(count, kernels.WORDS[width])
            kernels.join(planes, rotated, words)
            yield words.tobytes()
    for word in kernels.WORDS.values():
        words, base = (random.integers(0, 256, count * np.dtype(word).itemsize, np.uint8).view(word) for _ in range(2))
        kernels.add(words, base)
        yield words.tobytes()
    plane = np.zeros(8 * count, np.uint8)
    kernels.unpack7(random.integers(0, 256, 7 * count, np.uint8), plane)
    yield plane.tobytes()
    words = random.integers(0, 1 << 32, 40 * count, np.uint32)
    sums = np.empty(max(1, -(-words.size // digest.BLOCK)), np.uint64)
    kernels.weighted_sums(words, digest.WORD_KEYS, sums)
    yield sums.tobytes()
    out = np.empty(count + 4096, np.uint8)
    sizes = zstd.ZstdEncoder(zstd.LITERALS).encode(plane[:count], 500, out)
    for wrong in (0, 1):
        decoded = np.zeros(count + wrong, np.uint8)
        try:
            zstd.decode(out[: sum(sizes)], sizes, 500, decoded)
        except Damaged as error:
            assert wrong
            yield str(error).encode()
        yield decoded.tobytes()


KEYS = digest.SecretKeys(bytes(range(32)))


def encoded(seed: int, count: int) -> Iterator[bytes]:
    """Yield the result of each loop of a save for random bytes."""
    random = np.random.default_rng(seed)
    for width, word in kernels.WORDS.items():
        words, base, out = (random.integers(0, 256, count * width, np.uint8).view(word) for _ in range(3))
        for rotate in (False, True) if width > 1 else ():
            planes = tuple(np.empty(count, np.uint8) for _ in range(width))
            kernels.split(words, rotate, planes)
            yield from (plane.tobytes() for plane in planes)
        kernels.subtract(words, base, out)
        yield out.tobytes()
        kernels.subtract(words, base, base)
        assert base.tobytes() == out.tobytes()
    for start, words in enumerate((out[:1], out, out[1:], np.resize(out, (kernels.STREAMED, 3)), np.resize(out, (500, 900)).T)):
        room = np.zeros(words.nbytes + 9, np.uint8)
        kernels.copy(words, room[start : start + words.nbytes])
        assert room.tobytes() == bytes(start) + words.tobytes() + bytes(9 - start)
        yield room.tobytes()
    packed = np.zeros(7 * count, np.uint8)
    kernels.pack7(random.integers(0, 256, 8 * count, np.uint8), packed)
    yield packed.tobytes()
    for size in (0, 3, 40 * count + 2, 4 * digest.BLOCK + 1):
        raw = random.integers(0, 256, size, np.uint8)
        yield repr((digest.raw_digest(raw), digest.digest_pair(raw, KEYS))).encode()


@pytest.mark.parametrize("count", [1, 33, 1013])
def test_numpy_returns_the_same_bytes(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = [*results(count, count), *encoded(count, count)]
    monkeypatch.setattr(kernels, "library", lambda: None)
    assert ahead == [*results(count, count), *encoded(count, count)]


@pytest.mark.parametrize(
    "call",
    [
        lambda few, many: kernels.join((few, many), True, np.empty(9, np.uint16)),
        lambda few, many: kernels.add(many, few),
        lambda few, many: kernels.split(many.view(np.uint16), True, (few, many)),
        lambda few, many: kernels.subtract(many, many, few),
        lambda few, many: kernels.copy(many, few),
        lambda few, many: kernels.pack7(many, few),
        lambda few, many: kernels.unpack7(few, many),
        lambda few, many: kernels.weighted_sums(many.view(np.uint32), digest.WORD_KEYS, np.empty(2, np.uint64)),
        lambda few, many: kernels.add(many[::2], many[:8]),
        lambda few, many: zstd.decode(few, [9], 16, many),
    ],
)
def test_mismatched_sizes_are_refused(call: Callable[..., None]) -> None:
    with pytest.raises(ValueError, match=r"sizes|contiguous|short|frames"):
        call(np.zeros(8, np.uint8), np.zeros(16, np.uint8))
