from __future__ import annotations

import pytest

from raystow.workers.gpu.codec_choice import sooner


@pytest.mark.parametrize(
    ("coding", "link", "store", "codec"),
    [
        (85, 55, 0, "deflate"),  # an H200
        (85, 55, 2.0, "deflate"),
        (5, 55, 0, "raw"),  # an encoder that is slower than the link
        (5, 55, 2.0, "deflate"),  # but the store is the bottleneck
        (85, 450, 0, "raw"),  # a link as fast as NVLink
    ],
)
def test_auto_selects_the_codec_with_the_shorter_save(coding: float, link: float, store: float, codec: str) -> None:
    choice = sooner(coding=coding, link=link, store=store)
    assert choice.codec == codec
    assert ("not known yet" in choice.why) == (not store)
