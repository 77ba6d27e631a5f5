"""``raystow sensitivity``: what rounding would do to a model's loss, and the rules that stay within a budget."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...storage.errors import RaystowError, StateError
from .present import emit, out, ratio_text, say, size, table
from .target import Json

if TYPE_CHECKING:
    from ..sensitivity import Proposal, Sensitivity

_WRITE = 'write a function that takes no arguments and returns {"state": ..., "loss": ...}, and perhaps "train" and "levels"'


def sensitivity(
    source: Annotated[
        str,
        typer.Argument(metavar="MODULE:FUNCTION", help="Returns a dict: what raystow.sensitivity takes.", show_default=False),
    ],
    budget: Annotated[float, typer.Option(min=0, metavar="LOSS", help="By how much the loss may change, predicted.")] = 0.01,
    json: Json = False,
) -> None:
    """Measure how rounding a state would move the loss, and propose rules.

    MODULE:FUNCTION is yours: it loads the model, its optimizer's state and a few batches, and returns a dict of state, loss and
    train. Groups of tensors are rounded one at a time, and put back as they were.

    Example:  raystow sensitivity my_run:probe --budget 0.005
    """
    from ..sensitivity import sensitivity as measure

    found = measure(**_arguments(source))
    proposal = found.propose(budget)
    if json:
        emit(_facts(found, proposal, budget))
        return
    steps = "" if found.trained is None else f"; {found.trained:.6g} after the steps of train, give or take {found.noise:.2g}"
    say(f"loss {found.loss:.6g}{steps}", style="bold")
    rows = [
        [t.group, "-" if t.rule is None else str(t.rule), size(t.raw), size(t.stored), ratio_text(t.stored, t.raw), _change(t)]
        for t in found.trials
    ]
    out.print(table("", ["GROUP", "RULE", ">RAW", ">STORED", ">RATIO", ">LOSS"], rows))
    out.print()
    if not proposal.rules:
        say(f"no rule stays within {budget:g}")
        return
    whole = f"{size(proposal.stored)} of {size(proposal.raw)} (ratio {ratio_text(proposal.stored, proposal.raw)})"
    say(f"within {budget:g}: {whole}, with a predicted change of {proposal.change:.3g}")
    for line in ("lossy={", *(f'    "{group}": {rule},' for group, rule in proposal.rules.items()), "}"):
        out.print(line)


def _change(trial: Any) -> str:
    return "" if trial.rule is None else f"{trial.change:+.2g}"


def _arguments(source: str) -> dict[str, Any]:
    """What the user's function returns, and in the place of ``loss`` and ``train`` what calls them."""
    module, _, name = source.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise StateError(f"cannot be had: {error}", subject=source, remedy=_WRITE) from error
    made = _called(function, source, _WRITE)
    if not isinstance(made, Mapping) or not {"state", "loss"} <= {*made} <= {"state", "loss", "train", "levels"}:
        raise StateError(f"returned {made!r:.80}", subject=source, remedy=_WRITE)
    if not isinstance(made["state"], Mapping):
        raise StateError(f"returned a state that is {made['state']!r:.80}", subject=source, remedy="make it a dict of tensors")
    called = {
        what: partial(_number, made[what], f"{what} of {source}") for what in ("loss", "train") if made.get(what) is not None
    }
    return {**made, **called}


def _number(function: Any, subject: str) -> float:
    """What a function of the user's returns, a number."""
    remedy = "write a function that takes no arguments and returns the loss as a number"
    found = _called(function, subject, remedy)
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError) as error:  # the last: a tensor of more than one element
        raise StateError(f"returned {found!r:.80}", subject=subject, remedy=remedy) from error


def _called(function: Any, subject: str, remedy: str) -> Any:
    """What a function of the user's returns. ``StateError`` if it is none or raises; from where is told before."""
    if not callable(function):
        raise StateError(f"{function!r:.80} is not a function", subject=subject, remedy=remedy)
    try:
        return function()
    except RaystowError:
        raise
    except Exception as error:
        if error.__traceback__ is not None and (within := error.__traceback__.tb_next) is not None:
            typer.echo("".join(traceback.format_tb(within)), err=True, nl=False)
        what = f"called with no arguments, it raised {type(error).__name__}: {error}"
        raise StateError(what, subject=subject, remedy=remedy) from error


def _facts(found: Sensitivity, proposal: Proposal, budget: float) -> dict[str, Any]:
    return {
        "loss": found.loss,
        "trained": found.trained,
        "noise": found.noise,
        "trials": [
            {
                "group": trial.group,
                "rule": None if trial.rule is None else str(trial.rule),
                "change": trial.change,
                "raw": trial.raw,
                "stored": trial.stored,
            }
            for trial in found.trials
        ],
        "budget": budget,
        "proposal": {
            "rules": {group: str(rule) for group, rule in proposal.rules.items()},
            "change": proposal.change,
            "raw": proposal.raw,
            "stored": proposal.stored,
        },
    }
