"""``raystow advise``: the recommended interval, and the sources of its inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from integration.cli_runner import ran, run, run_json
from raystow.storage.commit.committer import Committer
from raystow.storage.format.version_record import FragmentInfo, RestoreInfo, VersionRecord
from raystow.storage.repository import create_repository
from raystow.storage.runtime.clock import SYSTEM

STALLS = (0.5, 0.4, 4.0)


def make(folder: Path, *restored: float) -> Path:
    """Commit versions of steps 100, 200 and 300, created at 1,000, 1,200 and 1,400 s, and record restores at the given times."""
    committer = Committer(create_repository(str(folder)), SYSTEM.token())
    for number, stall in enumerate(STALLS):
        id, attempt = committer.reserve()
        record = VersionRecord(
            committer.catalog.id, id, attempt, committer.epoch, 100 * (number + 1), created=1000.0 + 200 * number, world_size=1
        )
        fragment = FragmentInfo(0, 1, "", (0,), 0, 0, 0, stall)
        restores = tuple(RestoreInfo(1, 100, at, 1, 1.0) for at in restored) if number == 2 else ()
        committer.commit(replace(record, fragments=(fragment,), restores=restores))
    return folder


def test_recorded_stalls_and_restores_give_the_interval(tmp_path: Path) -> None:
    facts = run_json("advise", make(tmp_path / "run", 900.0, 1100.0, 1300.0))  # the first restore started the run
    assert facts["stall"] == {"seconds": 0.5, "source": "median of 3 recorded saves"}
    assert facts["mtbf"]["seconds"] == 200
    assert facts["interval"] == 60  # at least a minute, unless the time between failures is given
    assert facts["steps"] == 30  # of 2 s
    assert facts["seconds_per_step"] == 2
    assert facts["present"] == {"interval": 200, "lost": pytest.approx(0.5 / 200 + 200 / 400)}
    assert facts["lost"] < facts["present"]["lost"]


def test_given_numbers_replace_recorded_ones(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    assert ran("advise", folder, "--mtbf", "40000s", "--stall", "50", "--budget", "1").stdout == (
        "save every 83.3 min (2,500 steps): 7.25 % of the time is lost to saves and\nfailures\n"
        "at present every 3.33 min: 25.25 %\n"
        "- stall of a save 50 s: as given\n"
        "- time between failures 11.1 h: as given\n"
        "- a step takes 2 s: median between versions\n"
        "- saves may take 1 % of the time: an interval of at least 83.3 min\n"
    )


def test_without_restores_a_published_failure_rate_is_used(tmp_path: Path) -> None:
    mtbf = run_json("advise", make(tmp_path / "run"))["mtbf"]
    assert mtbf["seconds"] == pytest.approx(86400 * 8 / 6.5e-3)
    assert mtbf["source"] == "less than two restores are recorded, so that of a study, for 1 rank"


def test_an_unrecorded_stall_must_be_passed(tmp_path: Path) -> None:
    create_repository(str(tmp_path / "empty"))
    assert run_json("advise", tmp_path / "empty", "--mtbf", "1h", code=4)["error"]["remedy"] == "give --stall SECONDS"
    facts = run_json("advise", tmp_path / "empty", "--mtbf", "1h", "--stall", "0.5")
    assert (facts["interval"], facts["steps"], facts["present"]) == (60, None, None)


@pytest.mark.parametrize("budget", ["0", "5e-324", "1e-310", "101", "nan"])
def test_budgets_without_an_interval_are_refused(tmp_path: Path, budget: str) -> None:
    assert run("advise", make(tmp_path / "run"), "--budget", budget).exit_code == 2
