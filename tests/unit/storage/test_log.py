from __future__ import annotations

import logging

import pytest

from raystow.storage import log
from raystow.storage.format import keys

logger = logging.getLogger("raystow.test")


def test_a_record_has_the_fields_of_process_logger_and_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log, "_here", {})
    log.here(node="n1")
    log.about(logger, repository="s3://b/run", step=1).warning("the save of step %d failed", 2, extra={"step": 2, "rank": 3})
    (line,) = caplog.records
    assert line.getMessage() == "the save of step 2 failed"
    assert {name: getattr(line, name) for name in ("node", "repository", "step", "rank")} == {
        "node": "n1",
        "repository": "s3://b/run",
        "step": 2,
        "rank": 3,
    }
    assert line.filename == "test_log.py"


def test_whose_returns_the_version_and_attempt_of_a_key() -> None:
    assert log.whose(keys.pack(7, "a" * 16, 0, "weights", 0)) == {"version": 7, "attempt": "a" * 16}
    assert log.whose("root.json") == {}
