"""The Deflate encoder, run in Triton's interpreter, writes streams that zlib decodes."""

from __future__ import annotations

import zlib

import pytest
from helpers.deflate_streams import encoded
from helpers.plane_streams import cases, check_sizes

TRIED = (
    *("exponents", "exponents, fewer", "zeros", "hardly anything but zeros", "zeros in rows", "one of each among zeros"),
    *("runs of 5 zeros", "runs of 257 zeros", "five zeros"),
)


@pytest.mark.usefixtures("interpreted")
def test_zlib_decodes_encoded_streams() -> None:
    given = {name: stream for name, stream in cases().items() if name in TRIED}
    assert len(given) == len(TRIED)
    coded = encoded(given.values())
    for (what, stream), data in zip(given.items(), coded, strict=True):
        assert zlib.decompress(data, wbits=-15) == stream.numpy().tobytes(), what
    check_sizes(dict(zip(given, map(len, coded), strict=True)))
