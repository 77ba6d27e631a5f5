"""Planted bugs that the simulation must detect: each is applied to a copy of the package, and seeds run until one fails.

``python -m tests.simulation.planted`` prints each bug with the seed and the invariant that it violates.

``BUGS`` is the table to adapt when the code changes: a bug is a name and edits, and ``source_edits`` describes an edit. An edit
names a function by its qualified name and finds it in whatever module it is; rename the function here when it is renamed there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .source_edits import Edit, edited

_ROOT = Path(__file__).parents[2]
SEEDS = 2000
"""Number of seeds within which every planted bug is detected."""


@dataclass(frozen=True)
class Bug:
    """A plausible programming error."""

    name: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Finding:
    """The first seed that fails and the invariant that it violates. ``seed`` is None if no seed fails."""

    bug: Bug
    seed: int | None
    broken: str


def _bug(name: str, *edits: tuple[str, str, str]) -> Bug:
    return Bug(name, tuple(Edit(*edit) for edit in edits))


def _without(invariant: str) -> tuple[str, str, str]:
    """Return an edit that disables an invariant of the package."""
    return f"invariants:{invariant}", "^", "return"


_GIVES_UP = """
import raystow.storage.errors as errors_of_the_bug
try:
    $store.put_if(*$write)
except errors_of_the_bug.{} as error_of_the_bug:
    raise errors_of_the_bug.SaveFailed("lost") from error_of_the_bug
"""
_UNUSED = "$going = {$entry for $entry in $going if $entry.id not in $users}"

BUGS = (
    _bug(
        "commits do not check the epoch",
        _without("writer_in_charge"),
    ),
    _bug(
        "commits check the epoch, not its owner",
        ("writer_in_charge", "($old.epoch, $old.owner) != ($fence.epoch, $fence.owner)", "$old.epoch != $fence.epoch"),
    ),
    _bug(
        "a coordinator takes charge without a new epoch",
        ("Committer.take_over", "replace($root, epoch=$root.epoch + 1, owner=$owner)", "replace($root, owner=$owner)"),
        _without("epoch_rises"),
    ),
    _bug(
        "a refused swap is not checked for an own earlier write",
        ("Register.update", "$store.put_if(*$write)", _GIVES_UP.format("PreconditionFailed")),
    ),
    _bug(
        "a lost answer counts as a failure: no read-back",
        ("Register.update", "$store.put_if(*$write)", _GIVES_UP.format("StoreUnavailable")),
    ),
    _bug(
        "a process does not recognize its own write when it reads it back",
        ("Register.update", "$old.write_id in $ours", "False"),
        ("Committer.commit", "$entry in $root.listed", "False"),
    ),
    _bug(
        "the root is swapped before the record is written",
        ("signed_record:put_signed", "$store.put($record.key(), [$data])", ""),
        (
            "Committer.commit",
            "$root = $self.catalog.register.update($add, $claims, final=())",
            "$root = $self.catalog.register.update($add, $claims); $self.catalog.store.put(record.key(), [record.dump()])",
        ),
    ),
    _bug(
        "an abandoned attempt is discarded although it was a version that was dropped",
        ("Committer.discard", "$live + [($d.id, $d.attempt) for $d in $root.dropped]", "$live"),
    ),
    _bug(
        "objects are discarded although the outcome of the commit is unknown",
        ("Coordinator.settled", "not isinstance($outcome, SaveFailed | NotARepository)", "False"),
    ),
    _bug(
        "a version is committed when the first fragment is there",
        ("Coordinator.fragment", "len($attempt.stored) == len($attempt.nodes)", "$attempt.stored"),
    ),
    _bug(
        "complete attempts are committed out of order",
        (
            "Coordinator.next_commit",
            "min(($a for $a in $attempts if not $a.phase.over), key=$id, default=None)",
            "next(($a for $a in $attempts if $a.phase is Phase.READY), None)",
        ),
    ),
    _bug(
        "a version does not wait for its parts",
        ("Coordinator.finished", "$attempt.world_size + len($attempt.parts)", "$attempt.world_size"),
    ),
    _bug(
        "the second process of a part does not fence the first",
        (
            "Membership.check",
            "if $processes[$rank] != $incarnation: ...",
            "if $processes[$rank] != $incarnation and $rank < 9: ...",
        ),
    ),
    _bug("members that have not restored together make a version", ("Attempt.has_other_past", "^", "return False")),
    _bug("deadlines are ignored", ("Coordinator.tick", "$now < $attempt.deadline", "True")),
    _bug(
        "objects are deleted before the version is dropped",
        (
            "RetentionPlan.drop",
            "$at = $catalog.now()",
            "$at = $catalog.now()\n"
            "for entry in self.dropped:\n"
            '    $catalog.store.delete(i.key for i in $catalog.store.list(f"versions/{entry.id:08d}-{entry.attempt}/"))',
        ),
    ),
    _bug(
        "a drop lowers next_id",
        (
            "RetentionPlan.drop",
            "replace($left, dropped=$dropped, **$more)",
            "replace($left, next_id=$left.versions[-1].id + 1, dropped=$dropped, **$more)",
        ),
        _without("next_id_grows"),
    ),
    _bug(
        "retention may drop the newest",
        ("policy:_always_kept", "$entries[-1:]", "()"),
        ("RetentionPlan.drop", "$root.versions[-1:]", "()"),
        _without("newest_stays"),
    ),
    _bug(
        "retention does not check the pins again",
        ("RetentionPlan.drop", "{$root.verified, *$pinned}", "{$root.verified}"),
        _without("pinned_stays"),
    ),
    _bug("retention ignores leases", ("plan_policy", "$catalog.leased()", "()")),
    _bug(
        "a reader does not read the root after it wrote its lease",
        ("Catalog.lease", "$versions = $self.root().listed", ""),
        (
            "Catalog.lease",
            "($fresh := $wanted - $leased)",
            "($fresh := $wanted - $leased) and ($versions := $self.root().listed) is not None",
        ),
    ),
    _bug(
        "a reader gets a lease on a version that it saw as dropped",
        ("Catalog.lease", "$version.entry not in $versions", "False"),
    ),
    _bug(
        "retention drops the bases of kept versions",
        ("policy:plan", "needed($entries, $ruled)", "needed((), $ruled)"),
        ("RetentionPlan.drop", _UNUSED, ""),
        _without("bases_live"),
    ),
    _bug(
        "the verified version is written whole",
        ("Goal.allows", "$id == $root.verified", "False"),
        _without("verified_stays"),
    ),
    _bug(
        "a plan made before a commit drops the bases of that commit",
        ("RetentionPlan.drop", _UNUSED, ""),
        _without("bases_live"),
        ("Coordinator.bases", "return $bases", "return set()"),
    ),
    _bug(
        "a commit does not check that its bases exist",
        _without("bases_live"),
        _without("bases_complete"),
        ("Coordinator.bases", "return $bases", "return set()"),
    ),
    _bug(
        "a version is rounded although it is the base of a thinned one",
        ("Goal.allows", "$user.resumable or $self.bits is not None", "$user.resumable"),
        ("policy:plan", "{$base for $entry in $all if not $entry.resumable and $kept for $base in $entry.bases}", "set()"),
    ),
    _bug("collection ignores the grace period", ("collect:_kept", "if $garbage.since < $grace: ...", "if False: ...")),
    _bug(
        "collection does not spend ids",
        ("CollectionPlan._spend", "$register.update($spend)", "$register.read()"),
    ),
    _bug(
        "collection trusts an old plan",
        ("CollectionPlan._spend", "[$g for $g in $due if $g.attempt not in $listed]", "$due"),
    ),
    _bug(
        "collection ignores leases",
        ("CollectionPlan.execute", "[$g for $g in $due if ($g.id, $g.attempt) not in $held]", "$due"),
        ("collect:_kept", "if ($garbage.id, $garbage.attempt) in $leased: ...", "if False: ..."),
    ),
    _bug(
        "collection leaves the notes of rewrites in the root",
        (
            "CollectionPlan._spend",
            "tuple($r for $r in $root.rewrites if ($r.id, $r.attempt) not in $gone)",
            "$root.rewrites",
        ),
    ),
    _bug(
        "a commit ignores a rollback since its save began",
        _without("commit_after_rollback"),
    ),
    _bug(
        "rolled-back versions are garbage",
        ("collect:_plan_all", "$root.listed", "$root.versions"),
        ("CollectionPlan._spend", "$root.listed", "$root.versions"),
    ),
    _bug(
        "a rollback loses the predecessors of rolled-back versions",
        ("history:roll_back", "RolledBack($entry, $before, $at)", "RolledBack($entry, 0, $at)"),
        _without("history_stays"),
    ),
    _bug(
        "a drop leaves dropped versions as predecessors",
        ("history:without", "remaining($before, $one.after, $gone)", "$one.after"),
        _without("history_stays"),
    ),
    _bug(
        "a reader takes a rolled-back version for the newest",
        ("LocalAgreement.settle", "$siblings = $root.versions", "$siblings = $root.listed"),
    ),
    _bug(
        "the digests of a rank are compared in all attempts",
        (
            "Coordinator.finished",
            "$attempt.comparison.note(rank, digests)",
            "[one.comparison.note(rank, digests) for one in self._attempts.values()]",
        ),
    ),
    _bug("differences of replicas are not reported", ("ReplicaReports.report", "^", "return None")),
    _bug(
        "the rank with the lowest number is taken for the majority",
        ("_Sides.of", "max($ranks, key=$most)", "min($ranks, key=lambda whole: min($ranks[whole]))"),
    ),
    _bug("ages are measured by the local clock", ("store_clock:now", "^", "return clock.now()")),
)


def changed(bug: Bug) -> dict[Path, str]:
    """Return the changed sources by their path in the package. ``AssertionError`` if the edits do not match the code."""
    try:
        return edited(_ROOT / "raystow", bug.edits)
    except AssertionError as error:
        raise AssertionError(f"{bug.name}: {error}") from error


def plant(bug: Bug, folder: Path) -> None:
    """Copy the package and the simulation to ``folder`` and apply the bug to the copy."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_ROOT / "raystow", folder / "raystow", ignore=ignored)
    shutil.copytree(_ROOT / "tests" / "simulation", folder / "tests" / "simulation", ignore=ignored)
    for path, source in changed(bug).items():
        (folder / "raystow" / path).write_text(source)


def find(bug: Bug, seeds: int = SEEDS) -> Finding:
    """Play seeds with a bug, from 0 on, until one fails."""
    with tempfile.TemporaryDirectory(prefix="raystow-planted-") as folder:
        plant(bug, Path(folder))
        done = subprocess.run(
            [sys.executable, "-m", "tests.simulation", "0", str(seeds - 1)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder},
            capture_output=True,
            text=True,
        )
    if done.returncode == 0:
        return Finding(bug, None, "")
    first = done.stdout.partition("\n")[0]
    assert first.startswith("seed "), done.stdout + done.stderr
    seed, _, broken = first.removeprefix("seed ").partition(": ")
    return Finding(bug, int(seed), broken)


def find_all(workers: int = 2) -> list[Finding]:
    """Find every bug of ``BUGS``."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(find, BUGS))


if __name__ == "__main__":
    print("| planted bug | seed | violated invariant |\n| --- | --- | --- |")
    for finding in find_all():
        print(f"| {finding.bug.name} | {finding.seed} | {finding.broken} |")
