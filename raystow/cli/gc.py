"""``raystow gc``."""

from __future__ import annotations

import contextlib
from typing import Annotated

from ..storage.errors import StoreError
from ..storage.object_store import ObjectStore
from ..storage.repository import open_repository
from ..storage.retention.collect import CollectionPlan, Garbage
from . import options
from .options import DryRun, Json, Uri, Yes
from .output import age, confirmed, count, emit, out, size, table
from .progress import progress_bar
from .versioned_bucket import NEEDS_A_RULE, keeps_deleted


def gc(
    uri: Uri,
    grace: Annotated[float, options.time(help="Keep what was dropped or written to within this time: 1h, 0s.")] = "1h",  # type: ignore[assignment]
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Delete objects that belong to no version.

    These are the objects of dropped versions and failed saves, and of killed writers: multipart uploads, temporary files, expired
    leases. Versions that are being restored are kept. The command may run during training; only --grace 0s can make a save in
    progress fail. An interrupted run can be repeated. With --json it does not ask.

    Example:  raystow gc s3://bucket/runs/llama --dry-run
    """
    repository = open_repository(uri)
    with progress_bar("listing", None, quiet=json, of_bytes=False) as advance:
        plan = repository.plan_collection(grace=grace, progress=advance)
    scraps = len(plan.scraps) + len(plan.unfinished)
    objects, nbytes = sum(g.objects for g in plan.due), sum(g.nbytes for g in plan.due)
    if not json:
        _print_plan(repository.uri, plan, scraps)
    question = f"delete {_amount(objects, nbytes, scraps)}?"
    deleted = {"attempts": 0, "objects": 0, "bytes": 0, "scraps": 0}
    if (plan.due or scraps) and not dry_run and (yes or json or confirmed(question, "nothing was deleted")):
        with progress_bar("deleting", objects, quiet=json, of_bytes=False) as advance:
            done = plan.execute(advance)
        deleted = {"attempts": done.attempts, "objects": done.objects, "bytes": done.nbytes, "scraps": done.scraps}
        if not json:
            out.print(f"deleted {_amount(done.objects, done.nbytes, done.scraps)}")
            _print_versioning(repository.store)
    if json:
        emit({"uri": repository.uri, "dry_run": dry_run, "garbage": [_row(g) for g in plan.garbage], "deleted": deleted})


def _print_plan(uri: str, plan: CollectionPlan, scraps: int) -> None:
    if plan.garbage:
        headers = [">ID", "ATTEMPT", "", ">OBJECTS", ">STORED", ">IDLE", "", "WHY IT IS KEPT"]
        out.print(table("", headers, map(_cells, plan.garbage)))
    if scraps:
        out.print(f"{count(scraps, 'scrap')}: ended leases, old probes, unfinished writes", style="dim")
    if not plan.garbage and not scraps:
        out.print(f"nothing to collect in {uri}")
    elif not (plan.due or scraps):
        out.print("nothing to delete yet")


def _print_versioning(store: ObjectStore) -> None:
    with contextlib.suppress(StoreError):  # it may not be asked
        if keeps_deleted(store):
            out.print(f"the bucket is versioned, so this freed no space: {NEEDS_A_RULE}")


def _amount(objects: int, nbytes: int, scraps: int) -> str:
    return f"{count(objects, 'object')}, {size(nbytes)}" + (f", and {count(scraps, 'scrap')}" if scraps else "")


def _cells(garbage: Garbage) -> list[str]:
    verdict = "keep" if garbage.kept else "delete"
    sizes = [str(garbage.objects), size(garbage.nbytes), age(garbage.since)]
    return [str(garbage.id), garbage.attempt, garbage.kind.value, *sizes, verdict, garbage.kept]


def _row(garbage: Garbage) -> dict[str, object]:
    return {
        "id": garbage.id,
        "attempt": garbage.attempt,
        "kind": garbage.kind.name.lower(),
        "objects": garbage.objects,
        "bytes": garbage.nbytes,
        "idle": round(garbage.since, 3),
        "kept": garbage.kept,
    }
