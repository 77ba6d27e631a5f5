"""The repositories at the start of trials, each made once by real processes and then filled with garbage."""

from __future__ import annotations

from pathlib import Path

from crash.processes import Zygote
from crash.trial_cluster import TrialCluster
from crash.trial_store import Place
from raystow.storage.format import keys
from raystow.storage.repository import open_repository
from raystow.storage.retention.policy import Policy
from raystow.storage.runtime.clock import SYSTEM
from raystow.storage.stores import durable

_SALT = 3


def templates(zygote: Zygote, place: Place, folder: Path) -> dict[str, str]:
    """Make the repositories: ``empty``, ``two`` and ``many`` with versions, ``parts`` with a part in each, and ``littered``
    with versions and every kind of garbage."""
    made = {"empty": place.empty("t-empty"), "two": place.empty("t-two"), "parts": place.empty("t-parts")}
    _save(zygote, made["two"], folder / "logs-two", [1, 2])
    _save(zygote, made["parts"], folder / "logs-parts", [1, 2], parts=True)
    made["many"] = place.copy(made["two"], "t-many")
    _save(zygote, made["many"], folder / "logs-many", [3, 4])
    made["littered"] = place.copy(made["many"], "t-littered")
    _litter(made["littered"])
    place.age_leases(made["littered"])
    return made


def _save(zygote: Zygote, uri: str, logs: Path, steps: list[int], *, parts: bool = False) -> None:
    logs.mkdir()
    cluster = TrialCluster(zygote, uri, logs, keep=0, parts=parts)
    try:
        cluster.start_cluster()
        for step in steps:
            outcomes = cluster.save(step, _SALT)
            assert all("version" in outcome for outcome in outcomes), outcomes
    finally:
        cluster.end()


def _litter(uri: str) -> None:
    """Drop two versions, and add attempts without a record, segments that no root names, a lease, a probe and a temporary
    file."""
    repository = open_repository(uri)
    repository.plan_retention(Policy(keep_last=2)).execute()
    root, store = repository.root(), repository.store
    for id in (2, root.next_id):
        attempt = SYSTEM.token()
        for group in ("weights", "optimizer"):
            store.put(keys.pack(id, attempt, 0, group, 0), [bytes(100)])
    for number in (root.next_segment, root.next_segment + 1):
        attempt = SYSTEM.token()
        store.put(keys.segment_entries(number, attempt, 0), [bytes(100)])
        store.put(keys.segment_record(number, attempt), [b"{}"])
    store.put(keys.lease(1, root.versions[0].attempt, SYSTEM.token()), [b"{}"])
    store.put(keys.trial(SYSTEM.token()), [b"left"])
    if uri.startswith("file://"):
        folder = Path(uri.removeprefix("file://"))
        for place in (folder, folder / keys.prefix(9, SYSTEM.token())):
            place.mkdir(exist_ok=True)
            (place / f"{durable.TEMPORARY}{SYSTEM.token()}").write_bytes(b"half")
