"""``raystow compact``."""

from __future__ import annotations

from typing import Annotated

import typer

from ..storage.format.root import Entry
from ..storage.retention.plan import CompactionPlan
from .exit_codes import conclude
from .options import DryRun, Json, Uri, Yes
from .output import confirmed, count, out, say, size, table
from .rewrite_versions import RewriteBatch
from .target import Target, open_target


def compact(
    uri: Uri,
    version: Annotated[
        list[str] | None, typer.Argument(metavar="VERSION", help="Only these versions: ids, pin names, 'step:60', or 'latest'.")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Store versions whole that are deltas to other versions.

    The tensors keep every bit. The newest version, the newest verified one and those being restored stay unchanged. `raystow
    prune` drops the bases; `raystow prune --compact` does both if that frees more than it writes. An interrupted run leaves each
    version unchanged or whole. With --json it does not ask.

    Example:  raystow compact s3://bucket/runs/llama 40
    """
    target = open_target(uri)
    named = [target.version(which).id for which in version or ()]
    plan = target.repository.plan_compaction(named or None)
    batch = RewriteBatch("compacting", plan.entries, plan.replacement)
    deltas = sorted((*plan.entries, *plan.kept), key=lambda entry: entry.id)
    if not json:
        _print_plan(target, plan, batch, deltas, named)
    question = f"store {count(len(batch.due), 'version')} whole?"
    if execute := bool(batch.due) and not dry_run and (yes or json or confirmed(question, "nothing was written")):
        batch.execute(quiet=json)
    if execute and not json:
        say(f"stored {count(len(batch.written), 'version')} whole, {batch.change()}")
        if batch.unchanged:
            say(f"{count(batch.unchanged, 'version')} unchanged: dropped, leased, verified or the newest by now")
    rows = [_row(target, entry, plan, batch) for entry in deltas]
    facts = {"uri": target.uri, "dry_run": dry_run, "versions": rows, "compacted": [entry.id for entry in batch.written]}
    conclude(batch.errors, facts if json else None)


def _print_plan(target: Target, plan: CompactionPlan, batch: RewriteBatch, deltas: list[Entry], named: list[int]) -> None:
    rows = []
    for entry in deltas:
        verdict, why = ("keep", plan.kept[entry]) if entry in plan.kept else ("compact", "")
        if entry.id in batch.sizes:
            why = f"about {size(batch.sizes[entry.id])} whole"
        rows.append([*target.cells(entry), ", ".join(map(str, entry.bases)), verdict, why])
    if rows:
        out.print(table("", [">ID", ">STEP", ">CREATED", ">STORED", ">NEEDS", "", "WHY"], rows))
    elif not named:
        say("no version is a delta to another")
    for id in sorted({*named} - {entry.id for entry in deltas}):
        say(f"version {id} is not a delta to another version")


def _row(target: Target, entry: Entry, plan: CompactionPlan, batch: RewriteBatch) -> dict[str, object]:
    return {
        **target.fields(entry),
        "bases": entry.bases,
        "compact": entry.id in batch.sizes,
        "stored_whole": batch.sizes.get(entry.id),
        "why": plan.kept.get(entry, ""),
    }
