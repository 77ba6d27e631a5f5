"""Spans of OpenTelemetry, in one process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.journal_port import EntryBox
from helpers.kept_spans import KeptSpans
from helpers.local_cluster import LocalCluster
from opentelemetry import trace
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace import SpanProcessor
from torch.distributed import checkpoint as dcp

import raystow
import raystow.dcp
from raystow.storage.runtime import spans
from raystow.storage.runtime.spans import ROOT, Span, span


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> KeptSpans:
    return KeptSpans(monkeypatch)


def test_a_save_of_two_ranks_is_one_trace(kept: KeptSpans, tmp_path: Path) -> None:
    with LocalCluster(str(tmp_path), nodes=2) as cluster:
        version = cluster.save_all([{"w": torch.ones(300_000)}, {"w": torch.ones(300_000)}], step=7)
    assert kept.paths() == {
        *("save", "save/save.rank", "save/save.rank/save.plan", "save/save.rank/save.stage"),
        *("save/save.node", "save/save.node/save.code", "save/save.node/save.upload"),
    }
    (save,) = kept.named("save")
    assert dict(save.attributes or {}) == {"raystow.version": version.id, "raystow.step": 7, "raystow.ranks": 2}
    assert {one.attributes["raystow.rank"] for one in kept.named("save.rank") if one.attributes} == {0, 1}
    assert len({one.context.trace_id for one in kept.all}) == 1
    assert all(one.end_time >= one.start_time for one in kept.all)


def test_a_failed_save_has_its_reason(kept: KeptSpans, tmp_path: Path) -> None:
    with LocalCluster(str(tmp_path)) as cluster, pytest.raises(raystow.SaveFailed):
        cluster.save({"w": torch.ones(3)}, step=7, world_size=2, timeout=0.1)
    for name in ("save", "save.rank", "save.node"):
        (one,) = kept.named(name)
        assert one.status.status_code is trace.StatusCode.ERROR
        assert "had not delivered their shards" in (one.status.description or "")


def test_a_save_without_a_cluster_is_traced(kept: KeptSpans, tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(300_000)}, storage_writer=raystow.dcp.Writer(tmp_path), no_dist=True)
    assert kept.paths() == {"save", *(f"save/save.{step}" for step in ("rank", "upload", "commit"))}


def test_a_restore_without_a_cluster_is_a_child(kept: KeptSpans, tmp_path: Path) -> None:
    with LocalCluster(str(tmp_path)) as cluster:
        cluster.save({"w": torch.ones(300_000)}, step=7)
    kept.exporter.clear()
    with kept.provider.get_tracer("test").start_as_current_span("serving"):
        raystow.restore_latest(str(tmp_path), {"w": torch.zeros(300_000)})
    rank = "serving/restore.rank"
    steps = {f"{rank}/restore.{step}" for step in ("agree", "plan", "read", "read/restore.fetch", "read/restore.decode")}
    assert kept.paths() == {"serving", rank, *steps}


def test_a_replay_is_traced(kept: KeptSpans) -> None:
    box, states = EntryBox(), [torch.nn.Linear(2, 1) for _ in range(2)]
    states[1].load_state_dict(states[0].state_dict())
    optimizers = [torch.optim.SGD(state.parameters(), 0.1) for state in states]
    with contextlib.closing(box.journal(states[0], optimizers[0])) as journal:
        journal.replay()
        states[0](torch.ones(2)).sum().backward()
        optimizers[0].step()
        journal.record(0)
        assert journal.flush()
    kept.exporter.clear()
    with contextlib.closing(box.journal(states[1], optimizers[1])) as journal:
        journal.replay()
    rank = "replay/replay.rank"
    assert kept.paths() == {"replay", rank, f"{rank}/replay.agree", f"{rank}/replay.steps"}


def test_a_span_is_the_child_of_a_context_from_elsewhere(kept: KeptSpans) -> None:
    remote = f"00-{'ab' * 16}-{'cd' * 8}-01"
    Span("commit", remote, bytes=3, left_out=None).end()
    (one,) = kept.all
    assert (one.context.trace_id, one.parent and one.parent.span_id) == (int("ab" * 16, 16), int("cd" * 8, 16))
    assert dict(one.attributes or {}) == {"raystow.bytes": 3}


def test_a_child_of_nothing_traced_is_not_traced(kept: KeptSpans) -> None:
    with span("commit", ""):
        assert spans.here() == ""
    assert not kept.all


def test_a_root_has_no_parent_in_its_thread(kept: KeptSpans) -> None:
    with span("outer"), span("inner", ROOT) as inner:
        assert spans.here() == inner.trace
    assert kept.paths() == {"outer", "inner"}


def test_an_error_ends_a_span_once(kept: KeptSpans) -> None:
    with pytest.raises(ValueError, match="full"), span("upload") as upload:
        raise ValueError("full")
    upload.end()
    (one,) = kept.all
    assert (one.status.status_code, one.status.description) == (trace.StatusCode.ERROR, "full")


class _Broken(SpanProcessor):
    def on_start(self, span: SdkSpan, parent_context: object = None) -> None:
        raise RuntimeError("no collector")


def test_an_error_of_a_processor_is_logged_once(kept: KeptSpans, caplog: pytest.LogCaptureFixture) -> None:
    kept.provider.add_span_processor(_Broken())
    for _ in range(2):
        with span("save"):
            pass
    assert [record.message.partition(";")[0] for record in caplog.records] == ["a span could not be recorded"]


def test_an_invalid_context_is_no_error(kept: KeptSpans, caplog: pytest.LogCaptureFixture) -> None:
    Span("commit", "not-a-context").end()
    assert "could not be recorded" in caplog.text
    assert not kept.all


def test_nothing_imports_opentelemetry(tmp_path: Path) -> None:
    program = f"""
import sys, raystow
from raystow.storage.runtime.spans import span
with span("save") as one: assert one.trace == ""
try: raystow.restore({str(tmp_path)!r}, {{}})
except raystow.RaystowError: pass
sys.exit(any(name.startswith("opentelemetry") for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
