"""``raystow prune``: drop the versions that no rule keeps, thin old ones, and write differences whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...storage.errors import StateError
from . import quantities
from .asking import agreed
from .present import age, count, emit, out, say, size, table
from .replacements import Replacements
from .reporting import complain, described, exit_code
from .target import Json, Target, Uri, open_target

if TYPE_CHECKING:
    from ...storage.format.root import Entry
    from ...storage.retention.plan import RetentionPlan
    from ...storage.retention.policy import Decision, Policy

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
    resumable: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of all but the newest N of these, keep the weights only.")
    ] = None,
    delta: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Of those that it thins, make N in a row (6 at most) differences, each to the one before."
        ),
    ] = None,
    mantissa_bits: Annotated[
        int | None,
        typer.Option(
            min=1, max=51, metavar="N", help="Round the weights of those that it thins, for good: 7 is bfloat16, 4 within 3.2 %."
        ),
    ] = None,
    compact: Annotated[
        bool, typer.Option("--compact", help="Write differences whole where what they need can go by that, and frees more.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would become of each version, and do nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Drop the versions that no rule keeps, and thin old ones.

    A version is kept if any --keep rule keeps it. The newest version, the newest verified one, pinned ones and those being
    restored are always kept, and as they are. With --resumable, older ones are written again without the optimizer's state: their
    weights keep every bit, and no training resumes from them; with --delta, most of these take little more than half as much, and
    are read through those before them; with --mantissa-bits, weights are rounded, and take less again. What a kept version is a
    difference to is kept with it; with --compact, the difference is written whole instead where that takes less. Asks before it
    does anything, unless --yes or --json is given. `raystow gc` frees the space.

    Example:  raystow prune s3://bucket/runs/llama --keep-last 3 --keep-every 1000
    """
    policy = _policy(
        keep_last=keep_last,
        keep_every=keep_every,
        keep_every_seconds=keep_interval,
        keep_best=quantities.best(keep_best) if keep_best is not None else None,
        max_bytes=max_bytes,
        resumable=resumable,
        delta=delta,
        mantissa_bits=mantissa_bits,
    )
    target = open_target(uri)
    plan = target.repository.plan_retention(policy, compact=compact)
    _check_metric(policy, plan, target)
    thin = Replacements("thinning", plan.thinned, plan.thinning)
    whole = Replacements("writing whole", plan.compacted, plan.compaction)
    if not json:
        _tell(target, plan, policy, thin, whole)
    anything, nothing = bool(plan.dropped or thin.due), f"nothing was dropped{' or thinned' if thin.due else ''}"
    doing = anything and not dry_run and (yes or json or agreed(_question(plan, thin, whole), nothing))
    gone = plan.drop() if doing else ()
    thinned = thin.execute(quiet=json) if doing else []
    compacted = whole.execute(quiet=json) if doing else []
    gone = plan.drop() if compacted else gone
    errors = [*thin.errors, *whole.errors]
    if json:
        rows = [_row(target, decision, thin, whole) for decision in plan.decisions]
        facts = {"uri": target.repository.uri, "dry_run": dry_run, "versions": rows}
        facts |= {"dropped": [entry.id for entry in gone], "thinned": sorted(entry.id for entry in thinned)}
        facts |= {"compacted": [entry.id for entry in compacted]}
        emit(facts | ({"error": described(errors[0])} if errors else {}))
    elif doing:
        _tell_done(plan, thin, whole, (gone, thinned, compacted))
    elif anything:
        say(f"{nothing}; when something is, {_OBJECTS_STAY}")
    for error in errors if not json else ():
        complain(described(error))
    if errors:
        raise typer.Exit(exit_code(errors[0]))


def _policy(**rules: Any) -> Policy:
    from ...storage.retention.policy import Policy

    if rules["max_bytes"] is not None and rules["max_bytes"] < 1:
        raise typer.BadParameter("--max-bytes takes at least 1 byte; leave the option out for no limit")
    for name in ("delta", "mantissa_bits"):
        if rules[name] is not None and rules["resumable"] is None:
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(f"{option} is a rule for what is thinned: say --resumable as well, as in --resumable 3")
    policy = Policy(**rules)
    if not (policy.drops or policy.resumable):
        raise typer.BadParameter(
            "say what to keep: --keep-last 3, --keep-every 1000 (steps), --keep-interval 6h, --keep-best loss:min:1, --max-bytes "
            "2TB or --resumable 3; several add up, and --dry-run shows what would become of each version"
        )
    return policy


def _check_metric(policy: Policy, plan: RetentionPlan, target: Target) -> None:
    """Refuse a metric that no version has: it is misspelt, and would keep nothing."""
    from ...storage.retention.policy import best_rule

    best = policy.keep_best
    if best is not None and plan.decisions and not any(best_rule(best) in decision.rules for decision in plan.decisions):
        what, remedy = f"no version has a number as metric {best[0]!r}", "`raystow show` tells a version's metrics"
        raise StateError(what, subject=target.repository.uri, remedy=remedy)


def _tell(target: Target, plan: RetentionPlan, policy: Policy, thin: Replacements, whole: Replacements) -> None:
    if not plan.decisions:
        out.print(f"no version yet in {target.repository.uri}", soft_wrap=True)
        return
    rows = [_cells(target, decision, thin, whole) for decision in plan.decisions]
    out.print(table("", [">ID", ">STEP", ">CREATED", ">STORED", "", "WHY"], rows))
    sizes = thin.sizes | whole.sizes
    kept = [sizes.get(decision.entry.id, decision.entry.stored) for decision in plan.decisions if decision.keep]
    freed = [entry.stored for entry in plan.dropped]
    sums = [f"keep {count(len(kept), 'version')}, {size(sum(kept))}", f"drop {len(freed)}, {size(sum(freed))}"]
    if thin.due:
        sums.insert(1, f"thin {len(thin.due)} of these, by about {size(sum(thin.before.values()) - sum(thin.sizes.values()))}")
    if whole.due:
        more = sum(whole.sizes.values()) - sum(whole.before.values())
        sums.insert(-1, f"write {len(whole.due)} of these whole, about {size(max(0, more))} more")
    out.print("; ".join(sums), style="dim")
    if policy.max_bytes is not None and sum(kept) > policy.max_bytes:
        what = "take more than" if not thin.due else "or thinned take more than"
        say(f"the versions that are always kept {what} {size(policy.max_bytes)}")


def _question(plan: RetentionPlan, thin: Replacements, whole: Replacements) -> str:
    parts = [f"drop {count(len(plan.dropped), 'version')}"] if plan.dropped else []
    parts += [f"thin {count(len(thin.due), 'version')}, for good"] if thin.due else []
    parts += [f"write {count(len(whole.due), 'version')} whole"] if whole.due else []
    return f"{' and '.join(parts)}?"


def _tell_done(
    plan: RetentionPlan,
    thin: Replacements,
    whole: Replacements,
    results: tuple[Sequence[Entry], Sequence[Entry], Sequence[Entry]],
) -> None:
    gone, *written = results
    done = [f"dropped {count(len(gone), 'version')}"] if plan.dropped else []
    stayed = len(plan.dropped) - len(gone)
    for all, some, how in ((thin, written[0], "thinned {}"), (whole, written[1], "wrote {} whole")):
        if all.due:
            sizes = sum(all.before[entry.id] for entry in some), sum(entry.stored for entry in some)
            done.append(f"{how.format(count(len(some), 'version'))}, {size(sizes[0])} to {size(sizes[1])}")
            stayed += len(all.due) - len(some) - all.failed
    say(f"{' and '.join(done)}; {_OBJECTS_STAY}")
    if stayed:
        say(f"{count(stayed, 'version')} stayed: pinned or verified meanwhile, or the newest now")


def _row(target: Target, decision: Decision, thin: Replacements, whole: Replacements) -> dict[str, Any]:
    entry = decision.entry
    return {
        **target.facts(entry),
        "keep": decision.keep,
        "thin": entry.id in thin.sizes,
        "stored_thin": thin.sizes.get(entry.id),
        "compact": entry.id in whole.sizes,
        "stored_whole": whole.sizes.get(entry.id),
        "rules": [
            *decision.rules,
            *([decision.thin] if entry.id in thin.sizes else []),
            *([decision.compact] if entry.id in whole.sizes else []),
        ],
    }


def _cells(target: Target, decision: Decision, thin: Replacements, whole: Replacements) -> list[str]:
    entry, verdict, why = decision.entry, decision.verdict, decision.why
    if decision.thin:
        left = thin.sizes.get(entry.id)
        verdict, why = ("thin", f"{why}: about {size(left)} stay") if left is not None else ("keep", ", ".join(decision.rules))
    if decision.compact:
        left = whole.sizes.get(entry.id)
        verdict, why = ("compact", f"{why}: about {size(left)}") if left is not None else ("keep", ", ".join(decision.rules))
    return [str(entry.id), str(entry.step), f"{age(target.age(entry.created))} ago", size(entry.stored), verdict, why]
