"""``raystow prune``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ..storage.errors import StateError
from ..storage.format.root import Entry
from ..storage.retention.plan import RetentionPlan
from ..storage.retention.policy import Decision, Policy, best_rule
from . import options
from .exit_codes import conclude
from .options import DryRun, Json, Uri, Yes, number
from .output import confirmed, count, out, say, size, table
from .rewrite_versions import RewriteBatch
from .target import Target, open_target

_OBJECTS_STAY = "the objects of dropped versions stay in the store until `raystow gc` deletes them"


def prune(
    uri: Uri,
    keep_last: Annotated[int | None, number(help="Keep the newest N versions.")] = None,
    keep_every: Annotated[
        int | None, number(metavar="STEPS", help="Keep the newest version of each range of so many steps.")
    ] = None,
    keep_interval: Annotated[float | None, options.time(help="Keep the newest version of each 30m, 6h or 1d (in UTC).")] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(metavar="METRIC:min:N", help="Keep the N versions with the least (min) or greatest (max) metric."),
    ] = None,
    max_bytes: Annotated[
        int | None, options.size(help="Drop the oldest of the kept versions too, down to this size: 2TB.")
    ] = None,
    resumable: Annotated[int | None, number(help="Thin all but the newest N of the kept versions to their weights.")] = None,
    delta: Annotated[int | None, number(help="Store up to N (at most 6) thinned versions in a row as deltas.")] = None,
    mantissa_bits: Annotated[
        int | None, number(max=51, help="Round the weights of thinned versions: 7 is bfloat16, 4 is within 3.2 %.")
    ] = None,
    compact: Annotated[
        bool, typer.Option("--compact", help="Store deltas whole where that lets their bases go and frees more than it writes.")
    ] = False,
    drop_rolled_back: Annotated[
        bool, typer.Option("--drop-rolled-back", help="Drop rolled-back versions, whatever the --keep rules say.")
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Drop the versions that no rule keeps, and thin old ones.

    A version is kept if any --keep rule keeps it. The newest version, the newest verified one, pinned versions, those being
    restored, and the bases of their deltas are always kept and never thinned. A rolled-back version is kept if a rule would keep
    it without the rollback. Thinning (--resumable) removes the optimizer state and keeps the weights bit for bit. Thinned
    versions cannot resume a training, and thinning cannot be undone. Dropped versions cannot be read, but use space until
    `raystow gc` runs. With --json it does not ask.

    Example:  raystow prune s3://bucket/runs/llama --keep-last 3 --keep-every 1000
    """
    if max_bytes is not None and max_bytes < 1:
        raise typer.BadParameter("--max-bytes must be at least 1 byte; omit the option for no limit")
    for option, value in (("--delta", delta), ("--mantissa-bits", mantissa_bits)):
        if value is not None and resumable is None:
            raise typer.BadParameter(f"{option} applies to thinned versions: add --resumable, such as --resumable 3")
    policy = Policy(
        keep_last=keep_last,
        keep_every=keep_every,
        keep_every_seconds=keep_interval,
        keep_best=options.best(keep_best) if keep_best is not None else None,
        max_bytes=max_bytes,
        resumable=resumable,
        delta=delta,
        mantissa_bits=mantissa_bits,
        drop_rolled_back=drop_rolled_back,
    )
    if not (policy.drops or policy.resumable):
        raise typer.BadParameter(
            "give a rule: --keep-last 3, --keep-every 1000 (steps), --keep-interval 6h, --keep-best loss:min:1, --max-bytes 2TB, "
            "--resumable 3 or --drop-rolled-back; rules add up, and --dry-run shows the effect on each version"
        )
    target = open_target(uri)
    plan = target.repository.plan_retention(policy, compact=compact)
    _check_metric(policy, plan, target)
    thin = RewriteBatch("thinning", plan.thinned, plan.replacement)
    whole = RewriteBatch("compacting", plan.compacted, plan.replacement)
    if not json:
        _print_plan(target, plan, policy, thin, whole)
    change, nothing = bool(plan.dropped or thin.due), f"nothing was dropped{' or thinned' if thin.due else ''}"
    dropped: Sequence[Entry] = ()
    if execute := change and not dry_run and (yes or json or confirmed(_question(plan, thin, whole), nothing)):
        dropped = plan.drop()
        thin.execute(quiet=json)
        whole.execute(quiet=json)
        if whole.written:
            dropped = plan.drop()
    if execute and not json:
        _print_result(plan, thin, whole, dropped)
    elif change and not json:
        say(f"{nothing}; after a drop, {_OBJECTS_STAY}")
    facts = {
        "uri": target.uri,
        "dry_run": dry_run,
        "versions": [_row(target, decision, thin, whole) for decision in plan.decisions],
        "dropped": [entry.id for entry in dropped],
        "thinned": sorted(entry.id for entry in thin.written),
        "compacted": [entry.id for entry in whole.written],
    }
    conclude([*thin.errors, *whole.errors], facts if json else None)


def _check_metric(policy: Policy, plan: RetentionPlan, target: Target) -> None:
    """Refuse a metric that no version has: it is misspelt, and would keep nothing."""
    best = policy.keep_best
    if best is not None and plan.decisions and not any(best_rule(best) in decision.rules for decision in plan.decisions):
        what, remedy = f"no version has a number as metric {best[0]!r}", "`raystow show` prints a version's metrics"
        raise StateError(what, subject=target.uri, remedy=remedy)


def _print_plan(target: Target, plan: RetentionPlan, policy: Policy, thin: RewriteBatch, whole: RewriteBatch) -> None:
    if not plan.decisions:
        out.print(f"no version yet in {target.uri}")
        return
    rows = [[*target.cells(decision.entry), *_verdict(decision, thin, whole)] for decision in plan.decisions]
    out.print(table("", [">ID", ">STEP", ">CREATED", ">STORED", "", "WHY"], rows))
    sizes = thin.sizes | whole.sizes
    kept = [sizes.get(decision.entry.id, decision.entry.stored) for decision in plan.decisions if decision.keep]
    sums = [f"keep {count(len(kept), 'version')}, {size(sum(kept))}"]
    if thin.due:
        saved = sum(thin.before.values()) - sum(thin.sizes.values())
        sums.append(f"thin {len(thin.due)} of these, by about {size(saved)}")
    if whole.due:
        more = sum(whole.sizes.values()) - sum(whole.before.values())
        sums.append(f"store {len(whole.due)} of these whole, about {size(max(0, more))} more")
    sums.append(f"drop {len(plan.dropped)}, {size(sum(entry.stored for entry in plan.dropped))}")
    say("; ".join(sums), style="dim")
    if policy.max_bytes is not None and sum(kept) > policy.max_bytes:
        say(f"the versions that are always kept{' or thinned' if thin.due else ''} take more than {size(policy.max_bytes)}")


def _verdict(decision: Decision, thin: RewriteBatch, whole: RewriteBatch) -> tuple[str, str]:
    """What happens to a version, and why."""
    if not (decision.compact or decision.thin):
        return decision.verdict, decision.why
    left = (whole if decision.compact else thin).sizes.get(decision.entry.id)
    if left is None:  # it cannot be read
        return "keep", ", ".join(decision.rules)
    return "compact" if decision.compact else "thin", f"{decision.why}: about {size(left)}"


def _question(plan: RetentionPlan, thin: RewriteBatch, whole: RewriteBatch) -> str:
    parts = [f"drop {count(len(plan.dropped), 'version')}"] if plan.dropped else []
    parts += [f"thin {count(len(thin.due), 'version')} irreversibly"] if thin.due else []
    parts += [f"store {count(len(whole.due), 'version')} whole"] if whole.due else []
    return f"{' and '.join(parts)}?"


def _print_result(plan: RetentionPlan, thin: RewriteBatch, whole: RewriteBatch, dropped: Sequence[Entry]) -> None:
    done = [f"dropped {count(len(dropped), 'version')}"] if plan.dropped else []
    done += [f"thinned {count(len(thin.written), 'version')}, {thin.change()}"] if thin.due else []
    done += [f"stored {count(len(whole.written), 'version')} whole, {whole.change()}"] if whole.due else []
    say(f"{' and '.join(done)}; {_OBJECTS_STAY}")
    if unchanged := len(plan.dropped) - len(dropped) + thin.unchanged + whole.unchanged:
        say(f"{count(unchanged, 'version')} unchanged: pinned, verified or the newest by now")


def _row(target: Target, decision: Decision, thin: RewriteBatch, whole: RewriteBatch) -> dict[str, object]:
    id = decision.entry.id
    rules = [*decision.rules, *([decision.thin] if id in thin.sizes else []), *([decision.compact] if id in whole.sizes else [])]
    return {
        **target.fields(decision.entry),
        "keep": decision.keep,
        "thin": id in thin.sizes,
        "stored_thin": thin.sizes.get(id),
        "compact": id in whole.sizes,
        "stored_whole": whole.sizes.get(id),
        "rules": rules,
    }
