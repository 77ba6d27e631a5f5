"""Retention policies as data: a policy goes in, a decision with reasons comes out for every version.

Pure: reads no store and no clock. Periods are fixed on the calendar, so that a plan made an hour later, or after every commit,
keeps the same versions of the past. ``retention.plan`` carries decisions out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..arguments import integer, refused
from ..coding.dtypes import MANTISSA
from ..format.root import Entry
from ..root.delta_chain import needed
from .compaction_policy import Freeing, as_it_is, freeings
from .thin_policy import MOST, chained

Best = tuple[str, str, int]
"""A metric's name, ``"min"`` or ``"max"``, and how many versions."""

_SPANS = ((86400, "d"), (3600, "h"), (60, "min"))
_NO_RULE = "no rule drops it"


@dataclass(frozen=True)
class Policy:
    """Choose the versions to keep.

    A version is kept if any of the ``keep_`` rules keeps it; without such a rule all are. Always kept are the newest version, the
    newest one that a deep verification found whole, pinned versions, versions that are being restored, and the versions that a
    kept one is a delta to. *Newer* means committed later, whatever the steps and clocks.

    The rules count live versions only. A rolled-back version is kept if a rule would keep it had nothing been rolled back. It
    takes the place of no live version, is never thinned, and is dropped first for ``max_bytes``.

    Args:
        keep_last: Keep so many of the newest versions.
        keep_every: Of all versions with the same ``step // keep_every``, keep the newest.
        keep_every_seconds: Of all versions with the same ``created // keep_every_seconds``, keep the newest; at least 1. Days and
            hours begin as those of UTC.
        keep_best: (metric, ``"min"`` or ``"max"``, how many): keep the best versions by a metric. Versions whose metric is
            missing, NaN, or not a number are not among them; of equal ones the newer is better. Versions whose record cannot be
            read are kept.
        max_bytes: The most stored bytes of all kept versions together. Versions that the rules above keep are dropped for it,
            oldest first, but none that is always kept; so the limit may stay exceeded.
        resumable: Of the kept versions that hold all that was saved, so many of the newest stay complete. Older ones are thinned:
            rewritten with their weights only, without the optimizer's state. Versions that are always kept are not thinned.
            ``max_bytes`` counts a version that will be thinned as 0, and by its size once it is.
        delta: With ``resumable``: of the thinned versions so many in a row, at most 6, are stored as deltas, each to the one
            before, and the next is whole. Versions that were thinned before do not change. None: a thinned version stays a delta
            to its base.
        mantissa_bits: With ``resumable``: the weights of thinned versions are rounded to so many bits of mantissa (bfloat16 has
            7; 4 are within 3.2 %). Applies to tensors with two dimensions or more and at least 4 KiB that were not rounded before
            and are not the base of a delta.
        drop_rolled_back: No rule keeps rolled-back versions. Pinned ones, those being restored and bases of kept versions stay.

    Raises:
        StateError: A rule is invalid.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_every_seconds: float | None = None
    keep_best: Best | None = None
    max_bytes: int | None = None
    resumable: int | None = None
    delta: int | None = None
    mantissa_bits: int | None = None
    drop_rolled_back: bool = False

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "max_bytes", "resumable", "delta", "mantissa_bits"):
            if (count := getattr(self, name)) is not None:
                integer(name, count, least=1, instead="None for no such rule", subject="retention")
                if name in ("delta", "mantissa_bits") and self.resumable is None:
                    raise refused(name, count, "resumable= as well: it is a rule for what is thinned", subject="retention")
        if self.delta is not None and self.delta > MOST:
            raise refused("delta", self.delta, f"at most {MOST}: it takes too long to read longer chains", subject="retention")
        if (bits := self.mantissa_bits) is not None and bits >= max(MANTISSA.values()):
            raise refused("mantissa_bits", bits, "less than 52, the bits of float64's", "None for all", subject="retention")
        seconds = self.keep_every_seconds
        if seconds is not None and not (type(seconds) in (int, float) and 1 <= seconds < math.inf):
            raise refused("keep_every_seconds", seconds, "at least 1 second", subject="retention")
        if self.keep_best is not None:
            _check_best(self.keep_best)

    @property
    def keeps(self) -> bool:
        """Whether there is a rule that says what to keep."""
        return any(rule is not None for rule in (self.keep_last, self.keep_every, self.keep_every_seconds, self.keep_best))

    @property
    def drops(self) -> bool:
        """Whether there is any rule at all; without one nothing is ever dropped."""
        return self.keeps or self.max_bytes is not None or self.drop_rolled_back


@dataclass(frozen=True)
class Decision:
    """What becomes of one version. ``rules``, for people: all that keep it; or why it is dropped, then what would keep it.
    ``thin``: why its weights alone are kept; empty if all of it is. ``base``: the id of the version that these are to be a
    delta to, None if they are to be whole, or if the policy does not say. ``mantissa_bits``: how many of these they keep,
    None for all. ``compact``: why it is to be written whole; empty if it is not."""

    entry: Entry
    keep: bool
    rules: tuple[str, ...]
    thin: str = ""
    compact: str = ""
    base: int | None = None
    mantissa_bits: int | None = None

    @property
    def verdict(self) -> str:
        """``keep``, ``thin``, ``compact`` or ``drop``."""
        return "drop" if not self.keep else "thin" if self.thin else "compact" if self.compact else "keep"

    @property
    def why(self) -> str:
        """The rules as one line."""
        if self.keep:
            return "; ".join(filter(None, (", ".join(self.rules), self.thin, self.compact)))
        others = [rule for rule in self.rules[1:] if rule != _NO_RULE]
        return self.rules[0] + (f", in spite of {', '.join(others)}" if others else "")


def plan(
    entries: Sequence[Entry],
    policy: Policy,
    *,
    pins: Mapping[str, int],
    metrics: Mapping[int, Mapping[str, object]],
    unread: Collection[int] = (),
    rolled_back: Collection[int] = (),
    verified: int = 0,
    leased: Collection[tuple[int, str]] = (),
    bases: Collection[int] = (),
    compact: bool = False,
) -> tuple[Decision, ...]:
    """Decide what becomes of each of ``entries`` (listed by the root, ids ascending).

    ``metrics``: by id, for ``keep_best``. ``unread``: ids of the versions whose records, and so metrics, cannot be read.
    ``rolled_back``: ids of the versions that are not live. ``verified``: the newest version verified. ``leased``: (id, attempt)
    under a lease. ``bases``: ids that saves under way may be deltas to. ``compact``: write deltas whole where that frees more
    bytes than it writes, and drop their bases.
    """
    live = [entry for entry in entries if entry.id not in rolled_back]
    kept = _always_kept(entries, live, pins=pins, verified=verified, leased=leased, bases=bases)
    safe = {id for id, rules in kept.items() if rules}
    if policy.keeps:
        for id, rule in _ruled(live, policy, metrics, unread):
            kept[id].append(rule)
        for id, rule in _ruled(entries, policy, metrics, unread):  # as if nothing had been rolled back
            if id in rolled_back and not policy.drop_rolled_back:
                kept[id].append(f"{rule}, rolled back")
    else:
        for id in kept.keys() - safe:
            if id not in rolled_back or not policy.drop_rolled_back:
                kept[id].append(_NO_RULE)
    thin = _thin(entries, policy, kept, safe, rolled_back)
    over = _over(sorted(entries, key=lambda entry: entry.id not in rolled_back), policy, kept, safe, thin)
    ruled = {id for id, rules in kept.items() if rules and id not in over}
    users = needed(entries, ruled)
    remaining = ruled | users.keys()
    thinned = remaining & thin.keys()
    delta_bases = chained(entries, thinned, ruled.difference(rolled_back), policy.delta) if policy.delta is not None else {}
    exact = {base for entry in entries if not entry.resumable and entry.id in remaining for base in entry.bases}
    bits = dict.fromkeys(thinned - exact, policy.mantissa_bits)
    decisions = dict[int, Decision]()
    for entry in entries:
        id, rules = entry.id, kept[entry.id]
        if id in users:
            others = f" and {len(users[id]) - 1} more" if users[id][1:] else ""
            rules = [*rules, f"base of version {users[id][-1]}{others}"]
        elif id in over:
            rules = ["over max_bytes", *rules]
        decisions[id] = Decision(
            entry,
            id in remaining,
            tuple(rules) or ("no rule keeps it",),
            thin=_how(thin[id], delta_bases.get(id), bits.get(id)) if id in thinned else "",
            base=delta_bases.get(id),
            mantissa_bits=bits.get(id),
        )
    if compact:
        last = f"last {policy.keep_last}"
        unchanged = {id: f"is kept as one of the {last} only" for id, rules in kept.items() if rules == [last]}  # and goes soon
        unchanged |= as_it_is(live, verified, leased, rolled_back) | dict.fromkeys(thin, "is thinned first")
        for freeing in freeings(entries, ruled, remaining, unchanged):
            decisions |= _freed(freeing, decisions)
    return tuple(decisions.values())


def best_rule(best: Best) -> str:
    """The name of this rule in ``Decision.rules``."""
    return f"best {best[0]} ({best[1]})"


def _always_kept(
    entries: Sequence[Entry],
    live: Sequence[Entry],
    *,
    pins: Mapping[str, int],
    verified: int,
    leased: Collection[tuple[int, str]],
    bases: Collection[int],
) -> dict[int, list[str]]:
    """For each id, why it is kept whatever the policy says."""
    kept: dict[int, list[str]] = {entry.id: [] for entry in entries}
    for entry in live[-1:]:
        kept[entry.id].append("newest")
    for name, id in sorted(pins.items()):
        if id in kept:
            kept[id].append(f"pinned as {name}")
    for entry in entries:
        if entry.id == verified:
            kept[entry.id].append("newest verified")
        if (entry.id, entry.attempt) in leased:
            kept[entry.id].append("leased")
        if entry.id in bases:
            kept[entry.id].append("base of a save under way")
    return kept


def _how(why: str, base: int | None, bits: int | None) -> str:
    """Why a version is thinned, and what is stored of its weights."""
    delta = f"as a delta to version {base}" if base is not None else ""
    return ", ".join(filter(None, (why, delta, f"{bits} bits of mantissa" if bits is not None else "")))


def _freed(freeing: Freeing, decisions: Mapping[int, Decision]) -> dict[int, Decision]:
    """The decisions on a base that is kept for its users only, and on these users."""
    base, users = freeing.base, freeing.users
    if freeing.lacks:
        (*rules, last), before = decisions[base.id].rules, decisions[base.id]
        return {base.id: replace(before, rules=(*rules, f"{last}: {freeing.lacks}"))}
    others = f" and {len(users) - 1} more are" if users[1:] else " is"
    last = f"version {users[-1].id}{others}" if users else "what needs those that need it is"  # which go
    gone = Decision(base, False, (f"no rule keeps it once {last} written whole",))
    why = f"written whole, so that version {base.id} can go"
    return {base.id: gone} | {user.id: replace(decisions[user.id], compact=why) for user in users}


def _ruled(
    entries: Sequence[Entry], policy: Policy, metrics: Mapping[int, Mapping[str, object]], unread: Collection[int]
) -> Iterator[tuple[int, str]]:
    """Ids, with the rules that keep them."""
    if (last := policy.keep_last) is not None:
        yield from ((entry.id, f"last {last}") for entry in entries[-last:])
    if (every := policy.keep_every) is not None:
        for run, id in {entry.step // every: entry.id for entry in entries}.items():  # the newest of each
            yield id, f"newest of steps {run * every} to {(run + 1) * every - 1}"
    if (seconds := policy.keep_every_seconds) is not None:
        for id in {entry.created // seconds: entry.id for entry in entries}.values():
            yield id, f"newest of its {_span(seconds)}"
    if (best := policy.keep_best) is not None:
        yield from ((id, best_rule(best)) for id in _best([entry.id for entry in entries], best, metrics))
        yield from ((entry.id, "unreadable record") for entry in entries if entry.id in unread)


def _best(ids: Sequence[int], best: Best, metrics: Mapping[int, Mapping[str, object]]) -> list[int]:
    metric, mode, number = best
    sign = 1 if mode == "min" else -1
    values = {id: metrics.get(id, {}).get(metric) for id in ids}
    # A bool is no number here, and NaN is not equal to itself. Of equal values the highest id comes first.
    ranked = [(sign * v, -id) for id, v in values.items() if isinstance(v, int | float) and type(v) is not bool and v == v]
    return [-id for _, id in sorted(ranked)[:number]]


def _over(
    entries: Sequence[Entry], policy: Policy, kept: Mapping[int, Sequence[str]], safe: set[int], thin: Collection[int]
) -> set[int]:
    """Ids that ``max_bytes`` drops of those that the rules keep, in the order of ``entries``."""
    over = set[int]()
    if policy.max_bytes is None:
        return over
    left = {id for id, rules in kept.items() if rules}
    size = {entry.id: 0 if entry.id in thin else entry.stored for entry in entries}
    bases = {entry.id: entry.bases for entry in entries}
    held = {*left, *needed(sorted(entries, key=lambda entry: entry.id), left)}
    users = Counter(base for id in held for base in bases[id])
    nbytes = sum(size[id] for id in held)
    for entry in entries:
        if nbytes <= policy.max_bytes:
            break
        if entry.id in safe or entry.id not in left:
            continue
        over.add(entry.id)
        left.remove(entry.id)
        unused = [entry.id]
        while unused:
            id = unused.pop()
            if id in held and id not in left and not users[id]:
                held.remove(id)
                nbytes -= size[id]
                users.subtract(bases[id])
                unused += bases[id]
    return over


def _thin(
    entries: Sequence[Entry], policy: Policy, kept: Mapping[int, Sequence[str]], safe: set[int], rolled_back: Collection[int]
) -> dict[int, str]:
    """Ids to thin, and why. No base of a version that stays complete is among them, and no rolled-back version."""
    if (resumable := policy.resumable) is None:
        return {}
    ruled = [id for id, rules in kept.items() if rules]
    held = {*ruled, *needed(entries, ruled)}
    whole = [entry for entry in entries if entry.resumable]  # what is thinned needs no more than weights
    live = [entry.id for entry in whole if entry.id in held and entry.id not in rolled_back]
    older = set(live[:-resumable]) - safe
    users = needed(whole, held - older)
    return dict.fromkeys(sorted(older - users.keys()), f"older than the last {resumable} resumable")


def _span(seconds: float) -> str:
    unit, name = next(((unit, name) for unit, name in _SPANS if seconds % unit == 0), (1, "s"))
    return f"{seconds / unit:g} {name}"


def _check_best(best: object) -> None:
    match best:
        case (str(), "min" | "max", int() as number) if type(best) is tuple and type(number) is int and number >= 1:
            return
    raise refused("keep_best", best, '(metric, "min" or "max", how many)', subject="retention")
