"""The stages on which crash trials run, and the table at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from crash.campaign import TABLE
from crash.processes import Zygote
from crash.start_repositories import templates
from crash.trial import Stage
from crash.trial_store import Folders, Prefixes
from raystow.storage.runtime.clock import SYSTEM


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Start the process that forks the processes of all trials."""
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def on_disk(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """Return a stage for trials in folders."""
    folder = tmp_path_factory.mktemp("crash")
    place = Folders(folder)
    return Stage(zygote, place, templates(zygote, place, folder), folder)


@pytest.fixture(scope="session")
def on_s3(zygote: Zygote, s3_bucket: str, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """Return a stage for trials in a bucket."""
    folder, place = tmp_path_factory.mktemp("crash-s3"), Prefixes(f"s3://{s3_bucket}/crash-{SYSTEM.token()}")
    return Stage(zygote, place, templates(zygote, place, folder), folder)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the numbers of points and trials. With ``pytest -n`` the table is in the worker processes, and nothing is printed."""
    if not TABLE:
        return
    terminalreporter.section("crash trials")
    terminalreporter.write_line(f"{'store':8}{'act':8}{'phase':10}{'process':14}{'points':>8}{'trials':>8}{'missed':>8}")
    for key, counts in TABLE.items():
        store, act, phase, process = key
        row = f"{store:8}{act:8}{phase:10}{process:14}{counts['points']:8}{counts['trials']:8}{counts['missed']:8}"
        terminalreporter.write_line(row)
    sums = [sum(counts[column] for counts in TABLE.values()) for column in ("points", "trials", "missed")]
    terminalreporter.write_line(f"{'':40}{sums[0]:8}{sums[1]:8}{sums[2]:8}")
