"""``raystow sensitivity``: what rounding would do to a model's loss, and the rules that stay within a budget."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .present import emit, out, ratio_text, say, size, table
from .target import Json

if TYPE_CHECKING:
    from ..sensitivity import Proposal, Sensitivity


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


def _arguments(source: str) -> Mapping[str, Any]:
    """What the user's function returns."""
    module, _, name = source.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function: Callable[[], Mapping[str, Any]] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise typer.BadParameter(f"{source!r} cannot be had: {error}") from error
    if not callable(function):
        raise typer.BadParameter(f"{source!r} is not a function")
    made = function()
    if not isinstance(made, Mapping) or not {"state", "loss"} <= {*made} <= {"state", "loss", "train", "levels"}:
        raise typer.BadParameter(f"{source} must return a dict of state and loss, and perhaps train and levels")
    return made


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
