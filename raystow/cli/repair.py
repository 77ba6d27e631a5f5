"""``raystow repair``."""

from __future__ import annotations

from ..storage.checks.repair import RepairPlan, plan_repair
from ..storage.checks.scan import ScannedAttempt
from ..storage.format import key_files
from ..storage.stores import open_store
from .options import DryRun, Json, Uri, Yes
from .output import confirmed, count, emit, moment, out, printable, say, size, table


def repair(uri: Uri, dry_run: DryRun = False, yes: Yes = False, json: Json = False) -> None:
    """Rebuild a lost or damaged root.json or raystow.json.

    Restores each version whose record, manifest and packs are complete; prints them and the reasons, then asks. Whole files are
    never replaced. Pins are lost, dropped versions return until they are dropped again, and of two attempts with one id the one
    with the higher epoch is used. With --json, nothing is written unless --yes is given. Saves in progress fail; later ones
    succeed.

    Example:  raystow repair s3://bucket/runs/llama --dry-run
    """
    store = open_store(uri)
    plan = plan_repair(store, trust=key_files.writer_trust())
    if not json:
        _print_plan(store.uri, plan)
    write = plan.needed and not dry_run and (yes or (not json and confirmed(_question(plan), "nothing was written")))
    written = plan.execute() if write else ()
    if json:
        emit(
            {
                "uri": store.uri,
                "dry_run": dry_run,
                "repository": plan.repository,
                "root": {"state": plan.root.state.value, "why": plan.root.why},
                "marker": {"state": plan.marker.state.value, "why": plan.marker.why},
                "found": [_row(found) for found in plan.found],
                "segments": [
                    {"number": one.number, "attempt": one.attempt, "back": not one.lacks, "why": one.lacks}
                    for one in plan.segments
                ],
                "notes": plan.notes,
                "written": written,
            }
        )
    elif written:
        say(f"wrote {' and '.join(written)}; check the versions with `raystow verify URI --all`")
    elif plan.needed:
        out.print("nothing was written")


def _print_plan(uri: str, plan: RepairPlan) -> None:
    if not plan.needed:
        out.print(f"nothing to repair: root and marker of {uri} are whole")
        return
    for look in (plan.root, plan.marker):
        out.print(printable(f"{look.key}: {look.state.value}{', ' + look.why if look.why else ''}"))
    if plan.found:
        out.print(table("", [">ID", "ATTEMPT", ">EPOCH", ">STEP", "CREATED", ">STORED", "", "WHY"], map(_cells, plan.found)))
    for one in plan.segments:
        say(f"segment {one.number} of the journal: {'left out, ' + one.lacks if one.lacks else 'comes back'}")
    for note in plan.notes:
        say(f"note: {note}")


def _question(plan: RepairPlan) -> str:
    if plan.new_root is None:
        return f"write {plan.marker.key}?"
    marker = f" and {plan.marker.key}" if plan.new_marker is not None else ""
    return f"write {plan.root.key}{marker}, with {count(len(plan.new_root.versions), 'version')}?"


def _cells(found: ScannedAttempt) -> list[str]:
    record = found.record
    facts = ["-"] * 4
    if record is not None:
        facts = [str(record.epoch), str(record.step), moment(record.created), size(record.stored)]
    return [str(found.id), found.attempt, *facts, "left out" if found.lacks else "back", found.lacks]


def _row(found: ScannedAttempt) -> dict[str, object]:
    facts = {name: getattr(found.record, name, None) for name in ("epoch", "step", "created", "stored")}
    return {"id": found.id, "attempt": found.attempt, **facts, "back": not found.lacks, "why": found.lacks}
