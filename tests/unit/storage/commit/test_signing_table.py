"""Tests the table in docs/security.md: the effect of each operation on versions that an attacker with write access has forged."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from helpers.builders import whole, write

import raystow
from raystow.cli.import_command import find_tensors
from raystow.orchestrator.coordinator.housekeeping import Housekeeping
from raystow.storage.checks.repair import plan_repair
from raystow.storage.commit.committer import Committer
from raystow.storage.errors import Untrusted
from raystow.storage.format import key_files, keys, records
from raystow.storage.format.signature import PublicKey, Signer
from raystow.storage.object_store import ObjectStore
from raystow.storage.repository import Repository, create_repository, open_repository
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores import open_store

ROOT = Path(__file__).parents[4]
TABLE = re.compile(r"\| operation \| keys .*?\n\n", re.DOTALL)
RANDOM = np.random.default_rng(0).standard_normal(5000)


@dataclass(frozen=True)
class Forged:
    """A repository that ``ours`` has signed first, and whose marker now also names ``theirs``.

    Versions 2 to 4 are signed by ``theirs``, and version 3 is a delta to version 2. The environment names only the key
    ``ours``.
    """

    repository: Repository
    ours: Signer
    folder: Path

    @property
    def uri(self) -> str:
        return self.repository.uri

    def copied(self) -> set[int]:
        """Return the ids of the versions with objects in the replica."""
        return {found[0] for info in self.replica.list(keys.VERSIONS) if (found := keys.attempt_of(info.key))}

    @property
    def replica(self) -> ObjectStore:
        return open_store(f"{self.uri}-copy")


def signer_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> Signer:
    monkeypatch.setenv(key_files.SIGNING_KEY, str(path))
    signer = key_files.signer()
    assert signer is not None
    return signer


def put_marker(repository: Repository, *signed_by: PublicKey) -> None:
    marker = {"repository": repository.id, "created": 0, "signed_by": [key.raw.hex() for key in signed_by]}
    repository.store.put(keys.MARKER, [records.dump(marker, keys.MARKER)])


@pytest.fixture
def forged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Forged:
    monkeypatch.delenv(key_files.TRUSTED_KEYS, raising=False)
    for name in ("ours", "theirs"):
        key_files.write_pair(tmp_path / name)
    theirs, ours = signer_of(tmp_path / "theirs", monkeypatch), signer_of(tmp_path / "ours", monkeypatch)
    repository = create_repository(f"memory://forged-{SYSTEM.token()}", signer=ours)
    write(Committer(repository, "training", ours), {"w": whole(RANDOM)})
    put_marker(repository, ours.public, theirs.public)
    other = Committer(Repository(repository.store, repository.id), "attacker", theirs)
    write(other, {"w": whole(RANDOM + 1), "large": whole(np.tile(RANDOM, 10))})
    write(other, {"w": whole(RANDOM + 1 + 1e-12)}, base=(2, {"w": RANDOM + 1}))
    write(other, {"w": whole(RANDOM + 2)})
    made = Forged(open_repository(repository.uri), ours, tmp_path)
    assert made.repository.version(3).record.bases == (2,)  # the version is valid according to the keys in the marker
    return made


def open_and_read(forged: Forged) -> None:
    assert forged.repository.latest().read("w")[0] == RANDOM[0] + 2  # type: ignore[union-attr]  # the marker's keys
    own = open_repository(forged.uri, trusted_keys=forged.folder / "ours.pub")
    assert own.version(1).read("w")[0] == RANDOM[0]
    with pytest.raises(Untrusted):
        own.version(4).read("w")


def restore(forged: Forged) -> None:
    # The repository as the coordinator describes it to its ranks, which have no keys.
    committer = Committer(create_repository(forged.uri, signer=forged.ours), "restarted", forged.ours)
    trusting = Repository(forged.repository.store, committer.catalog.id, signed_by=committer.catalog.trust.keys)
    for repository in (trusting, committer.catalog):
        with pytest.raises(Untrusted):
            repository.at(forged.repository.root().versions[-1]).read("w")


def compact(forged: Forged) -> None:
    with pytest.raises(Untrusted):
        forged.repository.plan_compaction().execute()


def prune(forged: Forged) -> None:
    policy = raystow.Policy(keep_last=4, resumable=1)
    with pytest.raises(Untrusted):
        forged.repository.plan_retention(policy).execute()


def housekeeping(forged: Forged) -> None:
    forged.repository.pin(forged.repository.version(3), "kept for long")
    before = forged.repository.root().versions
    repository = create_repository(forged.uri, signer=forged.ours)
    write(Committer(repository, "restarted", forged.ours), {"w": whole(RANDOM + 3)})
    Housekeeping(Committer(repository, "again", forged.ours)).run(raystow.Policy(keep_last=1))
    assert forged.repository.root().versions[:-1] == before[1:3]


def cp(forged: Forged) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(key_files.TRUSTED_KEYS, str(forged.folder / "ours.pub"))
        with pytest.raises(Untrusted):
            raystow.copy(forged.uri, f"{forged.uri}-copy")
    assert forged.copied() <= {1}


def cp_sign(forged: Forged) -> None:
    with pytest.raises(Untrusted):
        raystow.copy(forged.uri, f"{forged.uri}-copy", sign=True)
    assert forged.copied() <= {1}


def repair(forged: Forged) -> None:
    forged.repository.store.delete([keys.ROOT])
    plan = plan_repair(forged.repository.store, trust=key_files.writer_trust())
    assert [found.id for found in plan.found if not found.lacks] == [1]


def imported(forged: Forged) -> None:
    assert list(find_tensors.__annotations__) == ["source", "return"]  # the function gets a file, not a repository


def root_only(forged: Forged) -> None:
    forged.repository.pin(forged.repository.version(2), "theirs")
    forged.repository.rollback(1)
    forged.repository.rollback(4)
    forged.repository.unpin("theirs")
    forged.repository.plan_collection(grace=0).execute()


OPERATIONS: dict[str, Callable[[Forged], None]] = {
    "`raystow.open`, `raystow.latest`, `raystow.dcp.Reader`, commands that only read": open_and_read,
    "`Checkpointer.restore`": restore,
    "`raystow compact`": compact,
    "`raystow prune --resumable`, `--delta`, `--mantissa-bits`": prune,
    "compaction by the coordinator": housekeeping,
    "`raystow cp`": cp,
    "`raystow cp --sign`": cp_sign,
    "`raystow repair`": repair,
    "`raystow import`": imported,
    "`raystow rollback`, `pin`, `unpin`, `gc`": root_only,
}


def test_the_table_lists_every_operation() -> None:
    table = TABLE.search((ROOT / "docs" / "security.md").read_text())
    assert table is not None
    assert [line.split(" | ")[0].removeprefix("| ") for line in table[0].strip().splitlines()[2:]] == [*OPERATIONS]


@pytest.mark.parametrize("named", [True, False], ids=["by_marker", "unmarked"])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda operation: operation.__name__)
def test_forged_versions_are_never_signed(forged: Forged, operation: Callable[[Forged], None], *, named: bool) -> None:
    if not named:  # the marker does not require a signature any more
        forged.repository.store.put(keys.MARKER, [records.dump({"repository": forged.repository.id, "created": 0}, keys.MARKER)])
        forged = replace(forged, repository=open_repository(forged.uri))
    operation(forged)
    for store in (forged.repository.store, forged.replica):
        signatures = [info.key for info in store.list(keys.VERSIONS) if info.key.endswith(".sig")]
        signed = {key: records.load(store.get(key, max_bytes=4096), key)["key"] for key in signatures}
        ids = {found[0] for key, by in signed.items() if by == forged.ours.public.id and (found := keys.attempt_of(key))}
        assert ids <= {1, 5}


def test_a_signed_delta_to_a_forged_base_is_not_compacted(forged: Forged) -> None:
    """The base is checked as well: its bytes would become part of the signed version."""
    entry = forged.repository.root().versions[2]
    version = forged.repository.at(entry)
    signature = forged.ours.sign(forged.repository.id, entry.id, entry.attempt, bytes.fromhex(entry.digest))
    forged.repository.store.put(keys.signature(entry.id, entry.attempt), [signature])
    assert version.record.bases == (2,)
    with pytest.raises(Untrusted, match="signed with key"):
        forged.repository.plan_compaction().execute()
