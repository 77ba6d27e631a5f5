"""``raystow prune``: drop the versions that no rule keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...storage.errors import StateError
from . import quantities
from .asking import agreed
from .present import age, count, emit, out, say, size, table
from .target import Json, Target, Uri, open_target

if TYPE_CHECKING:
    from ...storage.retention import Decision, Policy
    from ...storage.retention_plan import RetentionPlan

_OBJECTS_STAY = "the objects of dropped versions stay in the store until `raystow gc` deletes them"


def prune(
    uri: Uri,
    keep_last: Annotated[int | None, typer.Option(min=1, metavar="N", help="The newest N versions.")] = None,
    keep_every: Annotated[
        int | None, typer.Option(min=1, metavar="STEPS", help="The newest version of each run of so many steps.")
    ] = None,
    keep_interval: Annotated[
        float | None,
        typer.Option(parser=quantities.duration, metavar="TIME", help="The newest version of each 30m, 6h or 1d."),
    ] = None,
    keep_best: Annotated[
        str | None, typer.Option(metavar="METRIC:min:N", help="The N versions with the least (min) or greatest (max) metric.")
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(
            parser=quantities.nbytes, metavar="SIZE", help="Drop the oldest also of these, down to so many stored bytes: 2TB."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would be dropped, and drop nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Drop the versions that no rule keeps.

    A version is kept if any --keep rule keeps it. The newest version, the newest verified one, pinned ones and those being
    restored are always kept. Asks before it drops anything, unless --yes or --json is given. `raystow gc` frees the space.

    Example:  raystow prune s3://bucket/runs/llama --keep-last 3 --keep-every 1000
    """
    policy = _policy(keep_last, keep_every, keep_interval, keep_best, max_bytes)
    target = open_target(uri)
    plan = target.repository.plan_retention(policy)
    _check_metric(policy, plan, target)
    if not json:
        _tell(target, plan, policy)
    dropping = (
        bool(plan.dropped)
        and not dry_run
        and (yes or json or agreed(f"drop {count(len(plan.dropped), 'version')}?", "nothing was dropped"))
    )
    gone = plan.execute() if dropping else ()
    if json:
        rows = [_row(target, decision) for decision in plan.decisions]
        emit({"uri": target.repository.uri, "dry_run": dry_run, "versions": rows, "dropped": [entry.id for entry in gone]})
    elif dropping:
        say(f"dropped {count(len(gone), 'version')}; {_OBJECTS_STAY}")
        if stayed := len(plan.dropped) - len(gone):
            say(f"{count(stayed, 'version')} stayed: pinned or verified meanwhile, or the newest now")
    elif plan.dropped:
        say(f"nothing was dropped; when something is, {_OBJECTS_STAY}")


def _policy(last: int | None, every: int | None, interval: float | None, best: str | None, max_bytes: int | None) -> Policy:
    from ...storage.retention import Policy

    policy = Policy(last, every, interval, quantities.best(best) if best is not None else None, max_bytes)
    if not policy.drops:
        raise typer.BadParameter(
            "say what to keep: --keep-last 3, --keep-every 1000 (steps), --keep-interval 6h, --keep-best loss:min:1 or "
            "--max-bytes 2TB; several add up, and --dry-run shows what they would drop"
        )
    return policy


def _check_metric(policy: Policy, plan: RetentionPlan, target: Target) -> None:
    """Refuse a metric that no version has: it is misspelt, and would keep nothing."""
    from ...storage.retention import best_rule

    best = policy.keep_best
    if best is not None and plan.decisions and not any(best_rule(best) in decision.rules for decision in plan.decisions):
        what, remedy = f"no version has a number as metric {best[0]!r}", "`raystow show` tells a version's metrics"
        raise StateError(what, subject=target.repository.uri, remedy=remedy)


def _tell(target: Target, plan: RetentionPlan, policy: Policy) -> None:
    if not plan.decisions:
        out.print(f"no version yet in {target.repository.uri}", soft_wrap=True)
        return
    rows = [_cells(target, decision) for decision in plan.decisions]
    out.print(table("", [">ID", ">STEP", ">CREATED", ">STORED", "", "WHY"], rows))
    kept = [decision.entry.stored for decision in plan.decisions if decision.keep]
    freed = [entry.stored for entry in plan.dropped]
    out.print(f"keep {count(len(kept), 'version')}, {size(sum(kept))}; drop {len(freed)}, {size(sum(freed))}", style="dim")
    if policy.max_bytes is not None and sum(kept) > policy.max_bytes:
        say(f"the versions that are always kept take more than {size(policy.max_bytes)}")


def _row(target: Target, decision: Decision) -> dict[str, Any]:
    entry = decision.entry
    return {
        "id": entry.id,
        "step": entry.step,
        "created": entry.created,
        "age": round(target.age(entry.created), 3),
        "stored": entry.stored,
        "keep": decision.keep,
        "rules": list(decision.rules),
    }


def _cells(target: Target, decision: Decision) -> list[str]:
    entry = decision.entry
    verdict = "keep" if decision.keep else "drop"
    return [str(entry.id), str(entry.step), f"{age(target.age(entry.created))} ago", size(entry.stored), verdict, decision.why]
