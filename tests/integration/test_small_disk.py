"""A full disk: dropped versions are deleted early, ``raystow gc`` needs no space, and errors name what frees some."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.builders import live_ids, orphans, whole, write
from helpers.fake_clock import FakeClock
from typer.testing import CliRunner

from raystow.cli.app import build
from raystow.orchestrator.coordinator.housekeeping import Housekeeping
from raystow.storage.commit.committer import Committer
from raystow.storage.commit.leases import Lease
from raystow.storage.errors import StoreFull
from raystow.storage.format import keys
from raystow.storage.repository import create_repository
from raystow.storage.retention.policy import Policy


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a file system of 6 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def save(committer: Committer, seed: int) -> None:
    """Commit a version of 1 MiB."""
    write(committer, {"w": whole(np.random.default_rng(seed).integers(0, 255, 1 << 20, np.uint8))})


def fill(folder: Path) -> None:
    """Leave no space."""
    with open(folder / "fill", "wb", 0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def test_dropped_versions_are_deleted_early_on_a_small_disk(small: Path) -> None:
    """One that a restore reads stays."""
    repository = create_repository(str(small / "run"))
    committer = Committer(repository, "me")
    save(committer, 0)
    (first,) = repository.versions()
    with Lease(repository.store, first.id, first.attempt, repository.clock):
        for seed in range(1, 9):
            save(committer, seed)
            Housekeeping(committer, early=0.0).run(Policy(keep_last=1))
        assert live_ids(repository) == [1, 9]
        repository.verify(first)


def test_dropped_versions_stay_while_there_is_space(tmp_path: Path) -> None:
    repository = create_repository(str(tmp_path / "run"))
    committer = Committer(repository, "me")
    for seed in range(3):
        save(committer, seed)
        Housekeeping(committer, early=0.0).run(Policy(keep_last=1))
    assert live_ids(repository) == [3]
    assert orphans(repository)


def test_collecting_needs_no_space(small: Path) -> None:
    repository = create_repository(str(small / "run"))
    committer = Committer(repository, "me")
    for seed in range(3):
        save(committer, seed)
    repository.plan_retention(Policy(keep_last=1)).execute()
    repository.store.put(keys.pack(9, "f" * 16, 0, "weights", 0), [b"of a save that was killed"])
    fill(small)
    assert "keep" in CliRunner().invoke(build(), ["gc", repository.uri, "--dry-run"]).output
    ended = CliRunner().invoke(build(), ["gc", repository.uri, "--grace", "0s", "--yes"])
    assert (ended.exit_code, orphans(repository)) == (0, [])


def test_errors_of_a_full_disk_name_what_frees_space_at_once(small: Path) -> None:
    repository = create_repository(str(small / "run"), clock=(clock := FakeClock()))
    committer = Committer(repository, "me")
    for seed in range(3):
        save(committer, seed)
    (_, middle, last), folder = repository.versions(), str(small / "new")
    repository.pin(middle, "middle")
    plan = repository.plan_retention(Policy(keep_last=1))
    fill(small)
    begun = clock.monotonic()
    writes: dict[str, Callable[[], object]] = {
        "put": lambda: repository.store.put("versions/x", [bytes(1 << 20)]),
        "create": lambda: create_repository(folder, clock=clock),
        "pin": lambda: repository.pin(last, "best"),
        "unpin": lambda: repository.unpin("middle"),
        "prune": lambda: plan.execute(),
        "rollback": lambda: repository.rollback(middle),
        "verify": lambda: repository.record_verified(last),
    }
    for name, change in writes.items():
        with pytest.raises(StoreFull, match=r"\(free space .* `raystow gc --grace 0s`"):
            change()
        assert clock.monotonic() == begun, name
