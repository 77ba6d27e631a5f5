"""Bugs that the simulation must find: each is put into a throw-away copy of the package, and seeds are played until one fails.

``python -m tests.simulation.planted`` prints the table of docs/design/008-simulation.md.
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

_ROOT = Path(__file__).parents[2]
SEEDS = 2000
"""Within which every planted bug is found."""


@dataclass(frozen=True)
class Edit:
    """In ``file`` of the package, ``old`` (which stands there once) becomes ``new``."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Bug:
    """What a tired programmer might have written."""

    name: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Finding:
    """The first seed that fails, and what it says. ``seed`` is None if none did."""

    bug: Bug
    seed: int | None
    broken: str


def _bug(name: str, *edits: tuple[str, str, str]) -> Bug:
    return Bug(name, tuple(Edit(*edit) for edit in edits))


_ROOT_PY, _COMMITTER, _COLLECT = "storage/format/root.py", "storage/committer.py", "storage/retention/collect.py"
_PLAN, _RETENTION, _REPOSITORY = "storage/retention/plan.py", "storage/retention/policy.py", "storage/repository.py"
_COMPACTION, _THINNING = "storage/retention/compaction.py", "storage/retention/thinning.py"
_COORDINATOR = "orchestrator/coordinator.py"
_ERRORS = "from ..errors import Damaged, NotFound, PreconditionFailed, StoreUnavailable"
_EITHER = "            except (PreconditionFailed, StoreUnavailable) as error:\n"
_GIVES_UP = '                raise SaveFailed("lost", subject=keys.ROOT) from error\n'

BUGS = (
    _bug(
        "commits do not check the epoch",
        (_COMMITTER, "if (root.epoch, root.owner) != (self.epoch, self.owner):", "if False:"),
    ),
    _bug(
        "commits check the epoch, not its owner",
        (_COMMITTER, "if (root.epoch, root.owner) != (self.epoch, self.owner):", "if root.epoch != self.epoch:"),
    ),
    _bug("a coordinator takes charge without a new epoch", (_COMMITTER, "epoch=root.epoch + 1, owner=owner", "owner=owner")),
    _bug(
        "a refused swap is believed, though it may be one's own",
        (_ROOT_PY, _ERRORS, _ERRORS.replace("PreconditionFailed,", "PreconditionFailed, SaveFailed,")),
        (
            _ROOT_PY,
            _EITHER,
            f"            except PreconditionFailed as error:\n{_GIVES_UP}            except StoreUnavailable as error:\n",
        ),
    ),
    _bug(
        "a lost answer counts as a failure: no read-back",
        (_ROOT_PY, _ERRORS, _ERRORS.replace("PreconditionFailed,", "PreconditionFailed, SaveFailed,")),
        (
            _ROOT_PY,
            _EITHER,
            f"            except StoreUnavailable as error:\n{_GIVES_UP}            except PreconditionFailed as error:\n",
        ),
    ),
    _bug(
        "one's own write is not recognized when it is read back",
        (_ROOT_PY, "if root.write_id in ours:", "if False:"),
        (_COMMITTER, "if entry in root.versions:", "if False:"),
    ),
    _bug(
        "the root is swapped before the record is written",
        (_COMMITTER, "    store.put(record.key(), [data])\n", ""),
        (
            _COMMITTER,
            "        self.repository.register.update(add)\n",
            "        self.repository.register.update(add)\n        self.repository.store.put(record.key(), [self._last[1]])\n",
        ),
    ),
    _bug(
        "a version that was dropped meanwhile is discarded with what was given up",
        (_COMMITTER, " + [(d.id, d.attempt) for d in root.dropped]", ""),
    ),
    _bug(
        "objects are discarded although nobody knows what became of the commit",
        (_COORDINATOR, "attempt.swept = not isinstance(outcome, SaveFailed)", "attempt.swept = False"),
    ),
    _bug(
        "a version is committed when the first fragment is there",
        (_COORDINATOR, "if len(attempt.stored) == len(attempt.nodes):", "if attempt.stored:"),
    ),
    _bug(
        "whatever is complete is committed, out of order",
        (
            _COORDINATOR,
            "oldest = min((a for a in self._attempts.values() if not a.phase.over), key=lambda a: a.id, default=None)",
            "oldest = next((a for a in self._attempts.values() if a.phase is Phase.READY), None)",
        ),
    ),
    _bug("deadlines are not looked at", (_COORDINATOR, "if now < attempt.deadline:", "if True:")),
    _bug(
        "objects are deleted before the version is dropped",
        (
            _PLAN,
            "        at = store_clock.now(self.repository.store, self.repository.clock)\n",
            "        at, store = store_clock.now(self.repository.store, self.repository.clock), self.repository.store\n"
            "        for entry in doomed:\n"
            '            store.delete(i.key for i in store.list(f"versions/{entry.id:08d}-{entry.attempt}/"))\n',
        ),
    ),
    _bug(
        "a drop lowers next_id",
        (
            _PLAN,
            "                versions=tuple(entry for",
            "                next_id=root.versions[-1].id + 1,\n                versions=tuple(entry for",
        ),
    ),
    _bug(
        "retention may drop the newest",
        (_RETENTION, "for entry in entries[-1:]:", "for entry in ():"),
        (_PLAN, "for entry in root.versions[:-1] if", "for entry in root.versions if"),
    ),
    _bug(
        "retention does not look at the pins again",
        (
            _PLAN,
            "kept = {root.verified, *(id for name, id in root.pins.items() if name not in self.released)}",
            "kept = {root.verified}",
        ),
    ),
    _bug(
        "retention does not look for leases",
        (_REPOSITORY, "decisions = decide(leases.held(", "decisions = decide(() and leases.held("),
    ),
    _bug(
        "a reader does not look at the root after it wrote its lease",
        (_REPOSITORY, "                versions = self.root().versions\n                if", "                if"),
        (
            _REPOSITORY,
            "                for entry in fresh:\n",
            "                versions = self.root().versions\n                for entry in fresh:\n",
        ),
    ),
    _bug(
        "a reader is given a lease of what it sees to be gone",
        (_REPOSITORY, "if version.entry not in versions:", "if False:"),
    ),
    _bug(
        "retention does not keep what a version that stays is a difference to",
        (_RETENTION, "    users = needed(entries, ruled)", "    users = needed((), ruled)"),
        (_PLAN, "            going = {entry for entry in going if entry.id not in users}\n", ""),
    ),
    _bug(
        "what was verified last is written whole",
        (_COMPACTION, "(root.verified, root.versions[-1].id)", "(root.versions[-1].id,)"),
    ),
    _bug(
        "a plan made before a commit drops what that is a difference to",
        (_PLAN, "            going = {entry for entry in going if entry.id not in users}\n", ""),
        (_COORDINATOR, "return named if self._row is None else", "return set() and"),
    ),
    _bug(
        "a commit does not look whether what it is a difference to is there",
        (_COMMITTER, "if gone := set(entry.bases) - {", "if gone := set() - {"),
        (_COORDINATOR, "return named if self._row is None else", "return set() and"),
    ),
    _bug(
        "a version is rounded although a thinned one leans on it",
        (_THINNING, " if other.resumable or self.bits is not None for base", " if other.resumable for base"),
        (_RETENTION, "for id in going - exact:", "for id in going:"),
    ),
    _bug("collection knows no grace period", (_COLLECT, "elif g.since < grace:", "elif False:")),
    _bug(
        "collection does not spend ids",
        (
            _COLLECT,
            "root = self.register.update(spend)",
            "root = self.register.read()",
        ),
    ),
    _bug(
        "collection trusts an old plan",
        (_COLLECT, "return [g for g in due if (g.id, g.attempt) not in live]", "return due"),
    ),
    _bug(
        "collection ignores leases",
        (_COLLECT, "due = [g for g in due if (g.id, g.attempt) not in held]", "pass"),
        (_COLLECT, "        if (g.id, g.attempt) in held:", "        if False:"),
    ),
    _bug(
        "collection strikes out no notes of rewrites",
        (_COLLECT, "tuple(r for r in root.rewrites if (r.id, r.attempt) not in gone)", "root.rewrites"),
    ),
    _bug(
        "ages are judged by the machine's own clock",
        ("storage/store_clock.py", '    key = f"{PREFIX}{clock.token()}"\n', '    return clock.now()\n    key = ""\n'),
    ),
)


def plant(bug: Bug, folder: Path) -> None:
    """Make a copy of the package and of the simulation below ``folder``, with this bug in it."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_ROOT / "raystow", folder / "raystow", ignore=ignored)
    shutil.copytree(_ROOT / "tests" / "simulation", folder / "tests" / "simulation", ignore=ignored)
    for edit in bug.edits:
        path = folder / "raystow" / edit.file
        text = path.read_text()
        assert text.count(edit.old) == 1, (
            f"{bug.name}: {edit.file} has changed, {edit.old!r} stands there {text.count(edit.old)} times"
        )
        path.write_text(text.replace(edit.old, edit.new))


def find(bug: Bug, seeds: int = SEEDS) -> Finding:
    """Play seeds from 0 on with a bug, until one fails."""
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
    """Every bug."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(find, BUGS))


if __name__ == "__main__":
    print("| planted bug | seed | what the simulation says |\n| --- | --- | --- |")
    for finding in find_all():
        print(f"| {finding.bug.name} | {finding.seed} | {finding.broken} |")
