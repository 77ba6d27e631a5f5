from __future__ import annotations

import importlib.util
import logging

import pytest
import torch

from raystow.orchestrator.client.options import usable_codec
from raystow.storage.errors import StateError
from raystow.workers.gpu import nvcomp


def test_every_codec_is_accepted_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert [usable_codec(codec) for codec in ("auto", "deflate", "cpu")] == ["auto", "deflate", "cpu"]


@pytest.mark.skipif(importlib.util.find_spec("nvidia") is None, reason="nvCOMP is missing in any case")
def test_a_gpu_without_nvcomp_falls_back_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("nvidia") else find_spec(name))
    nvcomp._library.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert usable_codec("auto") == "cpu"
    assert "nvCOMP is not installed" in caplog.text
    with pytest.raises(StateError, match="nvCOMP is not installed"):
        usable_codec("deflate")
    assert usable_codec("cpu") == "cpu"
