"""Invariants that are checked after every change of the store by any process.

They read the true store and share no code with the package, except to decode numbers. The simulation reports what the store does
not show: the role of each process (``roles``), the expected bytes of each object (``expected``), leases, and the time at which an
operator began its plan.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3

from raystow.storage.coding.kernels import Words
from raystow.storage.errors import Damaged

from . import payload
from .histories import Histories
from .journal import Violation
from .model_store import STALE, Change, ModelStore
from .root_json import EMPTY, Attempt, Json, attempts_of, folder_of, is_as_much, listed_in, live_in

LEASE = 3600.0
_ATTEMPT = re.compile(r"versions/(\d+)-([0-9a-f]{16})/(.+)")
_LEASE = re.compile(r"leases/(\d+)-([0-9a-f]{16})-[0-9a-f]{16}\.json")

_REWRITERS = ("thinner", "compactor", "coordinator")


@dataclass
class Role:
    """The role of a process and the parameters that its actions must respect.

    ``grace``: grace period of its collections, in seconds. ``since``: time of the store at which it began to make the plan that
    it executes. ``asked``: time at which it last asked the store for the time. ``keep_last``, ``resumable``, ``bits`` (of
    mantissa): from the policy that it applies. ``epoch``, ``owner``: of a coordinator.
    """

    kind: str
    grace: float = LEASE
    since: float = 0.0
    asked: float = 0.0
    keep_last: int = 0
    resumable: int = 0
    bits: int | None = None
    epoch: int = -1
    owner: str = ""


@dataclass
class Lease:
    """A lease in the store. ``first``: number of the change that wrote it, at the time ``began``. ``guards``: the holder has
    since read the root with the version live, and the lease has been valid since then."""

    who: str
    attempt: Attempt
    first: int
    began: float
    modified: float
    guards: bool = False


@dataclass
class Watch:
    """Observer of the store: raises ``Violation`` during the change that violates an invariant."""

    model: ModelStore
    roles: dict[str, Role] = field(default_factory=dict)
    expected: dict[str, bytes] = field(default_factory=dict)
    root: Json | None = None
    committed: dict[Attempt, int] = field(default_factory=dict)
    refused: set[Attempt] = field(default_factory=set)
    leases: dict[str, Lease] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    left: dict[Attempt, int] = field(default_factory=dict)
    """Removed version -> number of the change that removed it from the root."""
    histories: Histories = field(default_factory=Histories)
    lost: bool = False
    """Whether the simulation has removed or corrupted the root."""
    read: dict[tuple[str, ...], Words] = field(default_factory=dict)
    """Keys of a pack and of its bases -> the decoded numbers."""
    records: dict[str, Json] = field(default_factory=dict)
    compared: dict[tuple[str, int], payload.Save] = field(default_factory=dict)
    """Attempt and rank -> the save whose bits it compares."""
    pasts: dict[tuple[str, int], payload.Past | None] = field(default_factory=dict)
    """Attempt and rank or part -> what it had restored before this save; None if it has no state to restore."""

    def __call__(self, change: Change) -> None:
        """Check a change of the store."""
        if change.key == "root.json":
            self._root_changed(change)
        elif match := _ATTEMPT.fullmatch(change.key):
            attempt = int(match[1]), match[2]
            if change.new is None:
                self._deleted(change, attempt)
            else:
                self._written(change, attempt)
        elif match := _LEASE.fullmatch(change.key):
            self._lease_changed(change, (int(match[1]), match[2]))
        elif change.key.startswith("probe/") and change.who in self.roles:
            self.roles[change.who].asked = self.model.now
        elif change.key == "raystow.json" and change.old is not None:
            raise Violation("the marker never changes", f"{change.who} has replaced or deleted it")

    def guards(self, who: str, attempt: Attempt, looked: int, *, written: bool) -> None:
        """A reader got a lease on a live version; it last read the root after change number ``looked``.
        ``written``: the reader knows that its lease was written."""
        if self.left.get(attempt, looked + 1) <= looked and not (self.root and attempt in attempts_of(listed_in(self.root))):
            raise Violation("a leased version is live", f"{who} got this answer for {attempt}, and had seen that it is not")
        for lease in self.leases.values():
            if (lease.who, lease.attempt) == (who, attempt) and self._counts(lease):
                lease.guards = lease.first <= looked
                if written and not lease.guards:
                    raise Violation("a lease is confirmed after it is written", f"{who} has not looked at the root since")

    def says_never(self, attempt: Attempt) -> None:
        """Record that a commit was permanently refused: the attempt must never become a version."""
        if self.root is not None and attempt in attempts_of(listed_in(self.root)):
            raise Violation("a refused commit is no version", f"attempt {attempt} was refused, and the root lists it")
        self.refused.add(attempt)

    def says_committed(self, attempt: Attempt) -> None:
        """Check a commit that was reported as successful."""
        if attempt not in self.committed:
            raise Violation("a reported commit is a version", f"attempt {attempt} was never in the root")

    def whole(self) -> None:
        """Check that every listed version is complete, byte for byte."""
        for entry in listed_in(self.root) if self.root is not None else ():
            self._check_whole(entry)
        self._check_numbers()

    def _root_changed(self, change: Change) -> None:
        if self.lost:
            self._repaired(change)
            return
        if change.new is None:
            raise Violation("the root is never deleted", change.who)
        old, new = self.root, json.loads(change.new.data)
        new = EMPTY | new
        self.root = new
        self._check_bases(change, new)
        if old is None:
            if (new["epoch"], new["next_id"], new["versions"]) != (0, 1, []):
                raise Violation("a repository begins empty", f"{change.who} wrote {new}")
            return
        if new["next_id"] < old["next_id"]:
            raise Violation("ids never go back", f"{change.who} lowered next_id from {old['next_id']} to {new['next_id']}")
        if new["epoch"] < old["epoch"]:
            raise Violation("epochs never go back", f"{change.who} lowered the epoch from {old['epoch']} to {new['epoch']}")
        kinds = {
            name
            for name in ("epoch", "next_id", "pins", "versions", "dropped", "rewrites", "verified", "repository", "owner")
            if old[name] != new[name]
        }
        moved = {name for name in ("rollbacks", "rolled_back") if old[name] != new[name]}
        role = self.roles.get(change.who, Role("nobody"))
        before, after = attempts_of(listed_in(old)), attempts_of(listed_in(new))
        self.left |= dict.fromkeys(before - after, self.model.changes)
        self.histories.rolled(new, self.model.changes)
        if "rollbacks" in moved and kinds <= {"versions", "verified"}:
            self.histories.check_rollback(change, old, new)
            if role.kind != "roller":
                raise Violation("only a rollback rolls back", f"{change.who} left {new}")
        elif {"dropped"} <= kinds <= {"versions", "dropped"} and after < before:
            self._dropped(change, role, old, new)
        elif moved:
            raise Violation("only a rollback rolls back", f"{change.who} changed {sorted(kinds | moved)}")
        elif kinds == {"epoch", "owner"}:
            self._took(change, role, old, new)
        elif kinds == {"next_id", "versions"} and new["versions"][:-1] == old["versions"]:
            self._committed(change, role, old, new)
        elif kinds == {"versions", "dropped", "rewrites"}:
            self._replaced(change, role, old, new)
        elif kinds == {"rewrites"} and len(new["rewrites"]) > len(old["rewrites"]):
            self._noted(change, role, old, new)
        elif kinds in ({"rewrites"}, {"rewrites", "next_id"}):
            self._struck_out(change, role, old, new)
            self._spent(change, role, old, new)
        elif kinds == {"pins"}:
            self._pinned(change, old, new)
        elif kinds == {"verified"}:
            if new["verified"] < old["verified"] or new["verified"] not in {id for id, _ in live_in(new)}:
                raise Violation("the verified version is live", f"{change.who} set verified to {new['verified']}")
        elif kinds == {"next_id"}:
            self._spent(change, role, old, new)
        elif kinds == {"dropped"}:
            self._forgotten(change, old, new)
        else:
            raise Violation(
                "a root write changes only what its kind of update may change", f"{change.who} changed {sorted(kinds)}"
            )
        self.histories.check(change, new)

    def _repaired(self, change: Change) -> None:
        """Check a repaired root: it lists the versions of the lost root and has a new owner."""
        assert change.new is not None
        assert self.root is not None
        old, new = self.root, json.loads(change.new.data)
        listed = {entry["id"]: entry for entry in listed_in(old)}
        # A repair may list the unthinned attempt of a version, or a complete rewrite that was not yet in the root.
        back = {
            e["id"] for e in new["versions"] if (e["id"], e["attempt"]) in self.committed or is_as_much(e, listed.get(e["id"]))
        }
        if lost := {attempt for attempt in attempts_of(listed_in(old)) - live_in(new) if attempt[0] not in back}:
            raise Violation("a repair brings back what was live", f"{lost} are lost")
        if new["owner"] in self.owners or any(id >= new["next_id"] for id, _ in self.committed):
            raise Violation("a repaired root is a new one", f"next_id {new['next_id']}, owner {new['owner']}")
        self.owners[new["owner"]] = change.who
        self.root, self.lost = (new := EMPTY | new), False
        self.histories.repaired(new)
        self._check_bases(change, new)
        for attempt in live_in(new):
            self.committed.setdefault(attempt, self.model.changes)
        self.refused -= live_in(new)
        self.whole()

    def _check_bases(self, change: Change, root: Json) -> None:
        ids, whole = set[int](), set[int]()
        live = {entry["id"] for entry in root["versions"]}
        for entry in listed_in(root):  # ids ascend
            there = (ids if entry.get("groups") else whole) & (live if entry["id"] in live else ids)
            if not set(entry.get("bases", ())) <= there:
                raise Violation("the bases of a version are live", f"{change.who} left version {entry['id']} without it")
            ids.add(entry["id"])
            whole |= set() if entry.get("groups") else {entry["id"]}

    def _took(self, change: Change, role: Role, old: Json, new: Json) -> None:
        # A coordinator that lost its epoch before it received the answer takes another epoch.
        again = self.owners.setdefault(new["owner"], change.who) == change.who and role.epoch < 0
        if new["epoch"] != old["epoch"] + 1 or not again:
            raise Violation("an epoch is taken once", f"{change.who} took epoch {new['epoch']} as {new['owner']}")

    def _committed(self, change: Change, role: Role, old: Json, new: Json) -> None:
        entry = new["versions"][-1]
        attempt = entry["id"], entry["attempt"]
        self.histories.committed(change, old, attempt)
        if not old["next_id"] <= entry["id"] == new["next_id"] - 1:
            raise Violation("ids never repeat", f"{change.who} committed id {entry['id']}, the next was {old['next_id']}")
        if attempt in self.committed or attempt in self.refused:
            raise Violation("an attempt is decided once", f"{change.who} committed {attempt} again, or after it was refused")
        if role.owner != new["owner"] or role.epoch != new["epoch"]:
            raise Violation(
                "at most one coordinator's writes win",
                f"{change.who} of epoch {role.epoch} committed version {entry['id']} in epoch {new['epoch']} of {new['owner']}",
            )
        self.committed[attempt] = self.model.changes
        self._check_whole(entry)
        self._check_numbers()

    def _dropped(self, change: Change, role: Role, old: Json, new: Json) -> None:
        gone = [e for e in listed_in(old) if (e["id"], e["attempt"]) not in attempts_of(listed_in(new))]
        noted = [(d["id"], d["attempt"]) for d in new["dropped"][len(old["dropped"]) :]]
        if noted != [(e["id"], e["attempt"]) for e in gone] or new["dropped"][: len(old["dropped"])] != old["dropped"]:
            raise Violation("dropped versions are noted in the root", f"{change.who} dropped {gone} and noted {noted}")
        ids = {e["id"] for e in gone}
        if old["versions"][-1]["id"] in ids:
            raise Violation("the newest version stays", f"{change.who} dropped version {old['versions'][-1]['id']}")
        if ids & {*old["pins"].values(), old["verified"]}:
            raise Violation("pinned and verified versions stay", f"{change.who} dropped {ids}")
        if role.kind == "coordinator" and (role.owner, role.epoch) != (new["owner"], new["epoch"]):
            raise Violation("at most one coordinator's writes win", f"{change.who} of epoch {role.epoch} dropped {ids}")
        newer = sum(id > max(ids) for id, _ in self.committed)
        if newer < role.keep_last:
            raise Violation("a policy is kept", f"{change.who} dropped {ids} of the last {role.keep_last}")
        for lease in self.leases.values():
            if lease.guards and lease.attempt in noted and self._counts(lease) and lease.began < role.since - STALE:
                raise Violation("leased versions are not dropped", f"{change.who} dropped {lease.attempt}, leased by {lease.who}")

    def _noted(self, change: Change, role: Role, old: Json, new: Json) -> None:
        (note,) = [rewrite for rewrite in new["rewrites"] if rewrite not in old["rewrites"]]
        if role.kind not in _REWRITERS or note["id"] not in {e["id"] for e in old["versions"][:-1]}:
            raise Violation("only an old version is rewritten", f"{change.who} noted {note}")
        if any(key.startswith(folder_of(note)) for key in self.model.objects):
            raise Violation("a rewrite is noted before it is written", f"{change.who} noted {note}")

    def _struck_out(self, change: Change, role: Role, old: Json, new: Json) -> None:
        """Check that only notes of idle rewrites are removed."""
        for note in old["rewrites"]:
            written = [held.modified for key, held in self.model.objects.items() if key.startswith(folder_of(note))]
            if note not in new["rewrites"] and role.asked - role.grace < max([note["at"], *written]) < role.asked - STALE:
                raise Violation("rewrites under way keep their notes", f"{change.who} struck out {note}")

    def _replaced(self, change: Change, role: Role, old: Json, new: Json) -> None:
        """Check a version that was replaced: thinned, linked, or written whole."""
        pairs = [(e, f) for e, f in zip(old["versions"], new["versions"], strict=True) if e != f]
        ((before, after),) = pairs
        attempt, note = (after["id"], after["attempt"]), {"id": before["id"], "attempt": before["attempt"]}
        noted = [{"id": d["id"], "attempt": d["attempt"]} for d in new["dropped"][len(old["dropped"]) :]]
        if noted != [note] or attempt not in attempts_of(old["rewrites"]) or attempt in attempts_of(new["rewrites"]):
            raise Violation("a replacement was noted and drops the replaced attempt", f"{change.who} wrote {attempt}, {noted}")
        same = ("id", "step", "created")
        if attempt in self.committed or [before[name] for name in same] != [after[name] for name in same]:
            raise Violation("a replacement is the same version", f"{change.who} made {after} of {before}")
        if role.kind == "coordinator" and (role.owner, role.epoch) != (new["owner"], new["epoch"]):
            raise Violation("at most one coordinator's writes win", f"{change.who} of epoch {role.epoch} replaced {after['id']}")
        for lease in self.leases.values():
            early = lease.began < role.asked - STALE and lease.who != change.who
            if lease.guards and lease.attempt == (before["id"], before["attempt"]) and self._counts(lease) and early:
                raise Violation("leased versions are not replaced", f"{change.who} replaced {lease.attempt}, of {lease.who}")
        self.committed[attempt] = self.model.changes
        self._check_whole(after)
        self._check_numbers()
        if before.get("groups") != after.get("groups"):
            self._thinned(change, role, old, before, after)
        elif role.kind == "thinner":
            self._linked(change, old, before, after)
        else:
            self._written_whole(change, role, old, before, after)

    def _thinned(self, change: Change, role: Role, old: Json, before: Json, after: Json) -> None:
        newer = sum(not e.get("groups") for e in old["versions"] if e["id"] > after["id"])
        if role.kind != "thinner" or newer < max(1, role.resumable) or after["id"] in {*old["pins"].values(), old["verified"]}:
            raise Violation("a pinned, verified or new version is not thinned", f"{change.who} thinned {after['id']}")
        weights = [node for node in self._nodes(before) if node % 2 == 0]
        if not weights or self._nodes(after) != weights:
            raise Violation("a thinned version keeps its weights", f"{change.who} made {after} of {before}")
        if self._bits(after) not in (None, role.bits):
            raise Violation("numbers are rounded as the policy says", f"{change.who} made {after}")

    def _linked(self, change: Change, old: Json, before: Json, after: Json) -> None:
        if after["id"] in {*old["pins"].values(), old["verified"]}:
            raise Violation("a pinned or verified version is not linked", f"{change.who} linked {after['id']}")
        if not after.get("groups") or before.get("bases") or self._bits(before) != self._bits(after):
            raise Violation("a linked version was whole and keeps its numbers", f"{change.who} made {after} of {before}")

    def _written_whole(self, change: Change, role: Role, old: Json, before: Json, after: Json) -> None:
        if role.kind not in ("compactor", "coordinator") or after["id"] in (old["verified"], old["versions"][-1]["id"]):
            raise Violation("the newest or verified version is not written whole", f"{change.who} wrote {after['id']} whole")
        if after.get("bases") or not before.get("bases") or self._bits(before) != self._bits(after):
            raise Violation("a version written whole was a delta", f"{change.who} made {after} of {before}")

    def _pinned(self, change: Change, old: Json, new: Json) -> None:
        added = {name: id for name, id in new["pins"].items() if old["pins"].get(name) != id}
        if not set(added.values()) <= {entry["id"] for entry in listed_in(new)}:
            raise Violation("a pin names a listed version", f"{change.who} pinned {added}")

    def _spent(self, change: Change, role: Role, old: Json, new: Json) -> None:
        """Check that only idle attempts lose their ids."""
        for key, held in self.model.objects.items():
            recent = role.asked - role.grace < held.modified < role.asked - STALE
            if recent and (match := _ATTEMPT.fullmatch(key)) and old["next_id"] <= int(match[1]) < new["next_id"]:
                raise Violation("attempts in flight keep their ids", f"{change.who} spent id {int(match[1])} of {match[2]}")

    def _forgotten(self, change: Change, old: Json, new: Json) -> None:
        rest = [d for d in old["dropped"] if d in new["dropped"]]
        if rest != new["dropped"]:
            raise Violation("a root write changes only what its kind of update may change", f"{change.who} added to 'dropped'")

    def _deleted(self, change: Change, attempt: Attempt) -> None:
        root, role = self.root, self.roles.get(change.who, Role("nobody"))
        if root is None:
            return
        if attempt in attempts_of(listed_in(root)) | attempts_of(root["rewrites"]):
            raise Violation("no object of a live version is deleted", f"{change.who} deleted {change.key}")
        for lease in self.leases.values():
            if lease.guards and lease.attempt == attempt and self._counts(lease):
                raise Violation("no object under a lease is deleted", f"{change.who} deleted {change.key}, leased by {lease.who}")
        if attempt in self.committed:
            at = next((d["at"] for d in root["dropped"] if (d["id"], d["attempt"]) == attempt), None)
            if at is not None and self.model.now < at + role.grace:
                raise Violation(
                    "dropped versions have a grace period",
                    f"{change.who} deleted {change.key}, dropped {self.model.now - at:.0f} s ago",
                )
        if role.kind == "gc" and attempt[0] >= root["next_id"]:
            raise Violation("only spent attempts are collected", f"{change.who} deleted {change.key}, which may be committed yet")

    def _written(self, change: Change, attempt: Attempt) -> None:
        assert change.new is not None
        if change.old is not None and change.old.data != change.new.data:
            raise Violation("objects are written once", f"{change.who} wrote other bytes to {change.key}")
        if self.root is not None and attempt in attempts_of(self.root["rewrites"]) and not change.key.endswith(".json"):
            self.expected[change.key] = change.new.data

    def _lease_changed(self, change: Change, attempt: Attempt) -> None:
        lease = self.leases.get(change.key)
        if change.new is None:
            if lease is not None and lease.who != change.who and self._counts(lease):
                raise Violation("a valid foreign lease is not deleted", f"{change.who} deleted {change.key} of {lease.who}")
            self.leases.pop(change.key, None)
        elif lease is None:
            self.leases[change.key] = Lease(change.who, attempt, self.model.changes, self.model.now, self.model.now)
        else:
            lease.guards = lease.guards and self._counts(lease)  # an expired lease guards nothing, even if it is renewed
            lease.modified = self.model.now

    def _counts(self, lease: Lease) -> bool:
        return self.model.now < lease.modified + LEASE

    def _check_whole(self, entry: Json) -> None:
        folder = folder_of(entry)
        record = self._bytes(folder + "version.json")
        if blake3(record).hexdigest() != entry["digest"] or len(record) != entry["size"]:
            raise Violation("a version is whole", f"{folder}version.json is not what the root says")
        fields = json.loads(record)
        names = [f"tensors-{f['node']:05d}.parquet" for f in fields["fragments"]]
        names += [
            f"{payload.GROUP}-{f['node']:05d}-{number:05d}.pack" for f in fields["fragments"] for number in range(f["packs"])
        ]
        if entry.get("bases", []) != sorted({base for f in fields["fragments"] for base in f.get("bases", ())}):
            raise Violation("a version is whole", f"the root does not tell what {folder} is a delta to")
        nodes = fields["world_size"] + len(fields.get("parts", ()))
        if "thinned" in fields:  # without its parts, whose fragments have no rows now
            nodes = max(nodes, len(fields["fragments"]))
        if sorted({f["node"] for f in fields["fragments"]}) != list(range(nodes)):
            raise Violation("a version is whole", f"{folder} has the fragments of {len(fields['fragments'])} nodes")
        for name in names:
            if self._bytes(folder + name) != self.expected.get(folder + name):
                raise Violation("a version is whole", f"{folder}{name} is not what was saved")

    def _check_numbers(self) -> None:
        """Check that every live version decodes to the saved numbers, rounded as its record says, whatever happened to its
        bases."""
        assert self.root is not None
        live = {entry["id"]: entry for entry in listed_in(self.root)}
        for entry in live.values():
            for node in self._nodes(entry):
                wanted = payload.numbers(node, entry["id"] % payload.KINDS, self._bits(entry))
                if not np.array_equal(self._numbers(live, entry, node)[1], wanted):
                    raise Violation("a version has its numbers", f"the part of node {node} in {folder_of(entry)} has others")

    def _numbers(self, live: dict[int, Json], entry: Json, node: int) -> tuple[tuple[str, ...], Words]:
        """Return the keys of the packs from which a part of a version is decoded, and its numbers."""
        pack = f"{folder_of(entry)}{payload.GROUP}-{node:05d}-00000.pack"
        beneath = {base: self._numbers(live, live[base], node) for base in entry.get("bases", ())}
        made_of = (pack, *(key for packs, _ in beneath.values() for key in packs))
        if made_of not in self.read:
            fragment = self._bytes(f"{folder_of(entry)}tensors-{node:05d}.parquet")
            try:
                self.read[made_of] = payload.decoded(node, fragment, self._bytes(pack), lambda base: beneath[base][1])
            except Damaged as error:
                raise Violation("a version has its numbers", f"{pack}: {error}") from error
        return made_of, self.read[made_of]

    def _nodes(self, entry: Json) -> list[int]:
        """Return the nodes that store packs of a version."""
        return sorted(fragment["node"] for fragment in self._record(entry)["fragments"] if fragment["packs"])

    def _bits(self, entry: Json) -> int | None:
        """Return the mantissa bits to which a thinned version was rounded, from its record."""
        bits: int | None = self._record(entry).get("thinned", {}).get("mantissa_bits")
        return bits

    def _record(self, entry: Json) -> Json:
        """Return the parsed version record, cached because records are written once."""
        folder = folder_of(entry)
        if folder not in self.records:
            self.records[folder] = json.loads(self._bytes(folder + "version.json"))
        return self.records[folder]

    def _bytes(self, key: str) -> bytes:
        held = self.model.objects.get(key)
        if held is None:
            raise Violation("a version is whole", f"{key} is missing")
        return held.data
