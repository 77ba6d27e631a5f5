"""``raystow compact``: write differences whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .asking import agreed
from .present import age, count, emit, out, say, size, table
from .replacements import Replacements
from .reporting import complain, described, exit_code
from .target import Json, Target, Uri, open_target

if TYPE_CHECKING:
    from ...storage.format.root import Entry
    from ...storage.retention.compaction import CompactionPlan


def compact(
    uri: Uri,
    version: Annotated[
        list[int] | None, typer.Option("--version", min=1, metavar="ID", help="Only this version; may be repeated.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would be written, and do nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Write versions whole that are differences to others.

    No bit of them changes, but they need no other version any more. The newest version, the one verified last and those being
    restored stay as they are. What nothing needs then stays until `raystow prune` drops it; `raystow prune --compact` does both,
    where that frees more than it writes. Asks before it does anything, unless --yes or --json is given.

    Example:  raystow compact s3://bucket/runs/llama --version 40
    """
    target = open_target(uri)
    named = [target.version(str(id)).id for id in dict.fromkeys(version or ())]
    plan = target.repository.plan_compaction(named or None)
    whole = Replacements("writing whole", plan.entries, plan.compaction)
    if not json:
        _tell(target, plan, whole, named)
    question = f"write {count(len(whole.due), 'version')} whole?"
    doing = bool(whole.due) and not dry_run and (yes or json or agreed(question, "nothing was written"))
    done = whole.execute(quiet=json) if doing else []
    if json:
        rows = [_row(target, entry, plan, whole) for entry in _all(plan)]
        facts = {"uri": target.repository.uri, "dry_run": dry_run, "versions": rows}
        facts |= {"compacted": [entry.id for entry in done]}
        emit(facts | ({"error": described(whole.errors[0])} if whole.errors else {}))
    elif doing:
        sizes = sum(whole.before[entry.id] for entry in done), sum(entry.stored for entry in done)
        say(f"wrote {count(len(done), 'version')} whole, {size(sizes[0])} are {size(sizes[1])} now")
        if stayed := len(whole.due) - len(done) - whole.failed:
            say(f"{count(stayed, 'version')} stayed: dropped, leased or verified meanwhile, or the newest now")
    for error in whole.errors if not json else ():
        complain(described(error))
    if whole.errors:
        raise typer.Exit(exit_code(whole.errors[0]))


def _all(plan: CompactionPlan) -> list[Entry]:
    return sorted((*plan.entries, *plan.kept), key=lambda entry: entry.id)


def _tell(target: Target, plan: CompactionPlan, whole: Replacements, named: list[int]) -> None:
    rows, differences = [], _all(plan)
    for entry in differences:
        bases = ", ".join(str(base) for base in entry.bases)
        verdict, why = ("keep", plan.kept[entry]) if entry in plan.kept else ("compact", "")
        if entry.id in whole.sizes:
            why = f"about {size(whole.sizes[entry.id])} by itself"
        rows.append(
            [str(entry.id), str(entry.step), f"{age(target.age(entry.created))} ago", size(entry.stored), bases, verdict, why]
        )
    if rows:
        out.print(table("", [">ID", ">STEP", ">CREATED", ">STORED", ">NEEDS", "", "WHY"], rows))
    elif not named:
        say("no version is a difference to another")
    for id in sorted({*named} - {entry.id for entry in differences}):
        say(f"version {id} is no difference to another")


def _row(target: Target, entry: Entry, plan: CompactionPlan, whole: Replacements) -> dict[str, Any]:
    return {
        **target.facts(entry),
        "bases": list(entry.bases),
        "compact": entry.id in whole.sizes,
        "stored_whole": whole.sizes.get(entry.id),
        "why": plan.kept.get(entry, ""),
    }
