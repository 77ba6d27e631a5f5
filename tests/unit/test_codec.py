from __future__ import annotations

import importlib.util
import logging

import pytest
import torch

from raystow.orchestrator.client.options import usable_codec
from raystow.storage.errors import StateError


def test_without_a_gpu_every_codec_may_be_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert [usable_codec(codec) for codec in ("auto", "deflate", "cpu")] == ["auto", "deflate", "cpu"]


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed: nothing is missing here")
def test_a_gpu_without_triton_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with caplog.at_level(logging.WARNING):
        assert usable_codec("auto") == "cpu"
    assert "triton" in caplog.text
    with pytest.raises(StateError, match="triton"):
        usable_codec("deflate")
    assert usable_codec("cpu") == "cpu"
