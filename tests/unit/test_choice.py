from __future__ import annotations

import pytest

from raystow.workers.gpu.codec_choice import sooner


@pytest.mark.parametrize(
    ("coding", "link", "store", "codec"),
    [
        (85, 55, 0, "deflate"),  # an H200
        (85, 55, 2.0, "deflate"),
        (5, 55, 0, "raw"),  # a coder that the link need not wait for
        (5, 55, 2.0, "deflate"),  # but a slow store is slower still
        (85, 450, 0, "raw"),  # a link as fast as those between GPUs
    ],
)
def test_auto_takes_what_gets_a_state_to_the_store_sooner(coding: float, link: float, store: float, codec: str) -> None:
    choice = sooner(coding=coding, link=link, store=store)
    assert choice.codec == codec
    assert ("not known yet" in choice.why) == (not store)
