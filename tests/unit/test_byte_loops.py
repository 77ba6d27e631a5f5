"""The precompiled loops return the same bytes as the loops compiled by numba and as numpy without numba."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from raystow.storage.coding import digest, kernels, zstd
from raystow.storage.errors import Damaged

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="this machine does not run the compiled loops")


def test_the_library_was_built_from_the_current_source() -> None:
    library, source = kernels.library(), kernels.LIBRARY.with_name("byte_loops.c").read_bytes()
    built = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, "source_digest")))
    assert built.decode() == hashlib.sha256(source).hexdigest(), "run: make byte-loops"


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
    packed = np.zeros(7 * count, np.uint8)
    kernels.pack7(random.integers(0, 256, 8 * count, np.uint8), packed)
    yield packed.tobytes()
    for size in (0, 3, 40 * count + 2, 4 * digest.BLOCK + 1):
        raw = random.integers(0, 256, size, np.uint8)
        yield repr((digest.raw_digest(raw), digest.digest_pair(raw, KEYS))).encode()


@pytest.mark.parametrize("count", [1, 33, 1013])
def test_all_implementations_return_the_same_bytes(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.with_numba()
    ahead = [*results(count, count), *encoded(count, count)]
    monkeypatch.setattr(kernels, "library", lambda: None)
    assert ahead == [*results(count, count), *encoded(count, count)]
    monkeypatch.setattr(kernels, "with_numba", lambda: False)
    assert ahead == [*results(count, count), *encoded(count, count)]


@pytest.mark.parametrize(
    "call",
    [
        lambda few, many: kernels.join((few, many), True, np.empty(9, np.uint16)),
        lambda few, many: kernels.add(many, few),
        lambda few, many: kernels.split(many.view(np.uint16), True, (few, many)),
        lambda few, many: kernels.subtract(many, many, few),
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
