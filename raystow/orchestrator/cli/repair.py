"""``raystow repair``: make a lost or damaged root anew from what lies in the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .asking import agreed
from .present import count, emit, moment, out, printable, say, size, table
from .target import Json, Uri

if TYPE_CHECKING:
    from ...storage.repair import RepairPlan
    from ...storage.survey import Found


def repair(
    uri: Uri,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would be written, and write nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Make a lost or damaged root, or marker, anew.

    Looks through all version records, and tells which versions come back and which are left out, and why. Then it asks. What is
    whole is not touched; pins are lost. With --json nothing is written unless --yes is given. Stop the run's coordinator first,
    or restart it afterwards: it can commit no more.

    Example:  raystow repair s3://bucket/runs/llama --dry-run
    """
    from ...storage.format import key_files
    from ...storage.repair import plan_repair
    from ...storage.stores import open_store

    store = open_store(uri)
    plan = plan_repair(store, trust=key_files.trust())
    if not json:
        _tell(store.uri, plan)
    writing = plan.needed and not dry_run and (yes or (not json and agreed(_question(plan), "nothing was written")))
    written = plan.execute() if writing else ()
    if json:
        emit(_facts(store.uri, plan, dry_run, written))
    elif written:
        say(f"written: {' and '.join(written)}; `raystow verify URI --all` looks at what came back")
    elif plan.needed:
        out.print("nothing was written")


def _tell(uri: str, plan: RepairPlan) -> None:
    if not plan.needed:
        out.print(f"nothing to repair: root and marker of {uri} are whole", soft_wrap=True)
        return
    for look in (plan.root, plan.marker):
        out.print(printable(f"{look.key}: {look.state.value}{', ' + look.why if look.why else ''}"), soft_wrap=True)
    if plan.found:
        out.print(table("", [">ID", "ATTEMPT", ">EPOCH", ">STEP", "CREATED", ">STORED", "", "WHY"], map(_cells, plan.found)))
    for note in plan.notes:
        say(f"note: {note}")


def _question(plan: RepairPlan) -> str:
    if plan.new_root is None:
        return f"write {plan.marker.key}?"
    back = count(len(plan.new_root.versions), "version")
    both = f" and {plan.marker.key}" if plan.new_marker is not None else ""
    return f"write {plan.root.key}{both}, with {back}?"


def _cells(found: Found) -> list[str]:
    record = found.record
    facts = ["-"] * 4
    if record is not None:
        facts = [str(record.epoch), str(record.step), moment(record.created), size(record.stored)]
    return [str(found.id), found.attempt, *facts, "left out" if found.lacks else "back", found.lacks]


def _facts(uri: str, plan: RepairPlan, dry_run: bool, written: tuple[str, ...]) -> dict[str, Any]:
    return {
        "uri": uri,
        "dry_run": dry_run,
        "repository": plan.repository,
        "root": {"state": plan.root.state.value, "why": plan.root.why},
        "marker": {"state": plan.marker.state.value, "why": plan.marker.why},
        "found": [_row(f) for f in plan.found],
        "notes": list(plan.notes),
        "written": list(written),
    }


def _row(found: Found) -> dict[str, Any]:
    record = found.record
    return {
        "id": found.id,
        "attempt": found.attempt,
        "epoch": record.epoch if record is not None else None,
        "step": record.step if record is not None else None,
        "created": record.created if record is not None else None,
        "stored": record.stored if record is not None else None,
        "back": not found.lacks,
        "why": found.lacks,
    }
