"""The commands' output for segments of the step journal."""

from __future__ import annotations

from pathlib import Path

from helpers.segment_run import SegmentRun, begin, record

from integration.cli_runner import ran, run_json
from raystow.storage.format import keys


def test_commands_report_segments(tmp_path: Path) -> None:
    """Check ls, show, cp, verify, repair and gc with a whole segment, one with a flipped bit, and one without its record."""
    run = SegmentRun(tmp_path / "run")
    run.save(0)
    training, journal = begin(run, 0)
    record(run, journal, training, range(1, 5))
    journal.close()
    first, second = run.root.segments
    uri, store = run.repository.uri, run.repository.store

    assert [one["step"] for one in run_json("ls", uri)["segments"]] == [2, 4]
    assert [one["step"] for one in run_json("show", uri)["segments"]] == [2, 4]
    assert "durable up to step 4: 2 segments" in ran("show", uri).stdout
    assert run_json("cp", uri, tmp_path / "replica")["segments"] == [first.number, second.number]
    assert "nothing to copy" in ran("cp", uri, tmp_path / "replica").output
    assert outcomes(uri, "--deep") == ["whole", "whole"]
    key = keys.segment_entries(second.number, second.attempt, 0)
    content = bytearray(store.get(key, max_bytes=1 << 30))
    content[-1] ^= 1
    store.put(key, [content])
    assert outcomes(uri) == ["whole", "whole"]  # a quick verification reads no entry
    assert outcomes(uri, "--deep", code=3) == ["whole", "damaged"]
    store.delete([keys.ROOT, keys.segment_record(first.number, first.attempt)])
    assert [one["back"] for one in run_json("repair", uri, "--yes")["segments"]] == [False, True]
    assert [one["kind"] for one in run_json("gc", uri, "--grace", "0s", "--yes")["garbage"]] == ["segment"]
    assert {keys.segment_of(info.key) for info in store.list(keys.SEGMENTS)} == {(second.number, second.attempt)}


def outcomes(uri: str, *options: str, code: int = 0) -> list[str]:
    return [one["outcome"] for one in run_json("verify", uri, *options, code=code)["segments"]]
