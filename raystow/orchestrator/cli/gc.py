"""``raystow gc``: delete the objects that belong to no version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import quantities
from .asking import agreed
from .present import age, count, emit, out, size, table
from .progress import object_bar
from .target import Json, Uri

if TYPE_CHECKING:
    from ...storage.retention.collect import CollectionPlan, Garbage


def gc(
    uri: Uri,
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="Leave alone what was dropped or written to within this time: 1h, 0s.")
    ] = "1h",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would be deleted, and delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Delete the objects that belong to no version.

    Those of versions that `raystow prune` or a policy has dropped, of saves that failed, and what killed writers left behind.
    Versions being restored are left alone. Safe while a run is saving, except that --grace 0s may fail a save under way.
    An interrupted collection is simply run again. Asks before it deletes anything, unless --yes or --json is given.

    Example:  raystow gc s3://bucket/runs/llama --dry-run
    """
    from ...storage.repository import open_repository

    repository = open_repository(uri)
    plan = repository.plan_collection(grace=quantities.duration(grace))
    if not json:
        _tell(repository.uri, plan)
    anything = bool(plan.due or plan.scraps or plan.unfinished)
    deleting = anything and not dry_run and (yes or json or agreed(f"delete {_objects(plan)}?", "nothing was deleted"))
    if not deleting:
        done = None
    else:
        with object_bar("deleting", sum(g.objects for g in plan.due), quiet=json) as advance:
            done = plan.execute(advance)
    if json:
        deleted = {"attempts": 0, "objects": 0, "bytes": 0, "scraps": 0}
        if done is not None:
            deleted = {"attempts": done.attempts, "objects": done.objects, "bytes": done.nbytes, "scraps": done.scraps}
        emit({"uri": repository.uri, "dry_run": dry_run, "garbage": [_row(g) for g in plan.garbage], "deleted": deleted})
    elif done is not None:
        out.print(f"deleted {_amount(done.objects, done.nbytes, done.scraps)}")


def _tell(uri: str, plan: CollectionPlan) -> None:
    if plan.garbage:
        out.print(
            table("", [">ID", "ATTEMPT", "", ">OBJECTS", ">STORED", ">IDLE", "", "WHY IT STAYS"], map(_cells, plan.garbage))
        )
    scraps = len(plan.scraps) + len(plan.unfinished)
    if scraps:
        out.print(f"{count(scraps, 'scrap')}: ended leases, old probes, unfinished writes", style="dim")
    if not plan.garbage and not scraps:
        out.print(f"nothing to collect in {uri}", soft_wrap=True)
    elif not (plan.due or scraps):
        out.print("nothing to delete yet")


def _objects(plan: CollectionPlan) -> str:
    objects, nbytes = sum(g.objects for g in plan.due), sum(g.nbytes for g in plan.due)
    return _amount(objects, nbytes, len(plan.scraps) + len(plan.unfinished))


def _amount(objects: int, nbytes: int, scraps: int) -> str:
    return f"{count(objects, 'object')}, {size(nbytes)}" + (f", and {count(scraps, 'scrap')}" if scraps else "")


def _cells(garbage: Garbage) -> list[str]:
    verdict = "keep" if garbage.kept else "delete"
    sizes = [str(garbage.objects), size(garbage.nbytes), age(garbage.since)]
    return [str(garbage.id), garbage.attempt, garbage.kind.value, *sizes, verdict, garbage.kept]


def _row(garbage: Garbage) -> dict[str, Any]:
    return {
        "id": garbage.id,
        "attempt": garbage.attempt,
        "kind": garbage.kind.name.lower(),
        "objects": garbage.objects,
        "bytes": garbage.nbytes,
        "idle": round(garbage.since, 3),
        "kept": garbage.kept,
    }
