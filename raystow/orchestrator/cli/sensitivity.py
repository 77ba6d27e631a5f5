"""``raystow sensitivity``."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import typer

from ...storage.errors import RaystowError, StateError
from .. import sensitivity as measurement
from ..sensitivity import Proposal, Sensitivity
from .options import Json
from .output import emit, fields_of, out, ratio_text, say, size, table

_WRITE = 'write a function without arguments that returns {"state": ..., "loss": ...}, and optionally "train" and "levels"'


def sensitivity(
    source: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION", help="Function that returns the arguments of raystow.sensitivity.")
    ],
    budget: Annotated[float, typer.Option(min=0, metavar="LOSS", help="Largest predicted change of the loss.")] = 0.01,
    json: Json = False,
) -> None:
    """Measure how rounding would change a model's loss, and propose rules.

    FUNCTION returns a dict: `state` (model and optimizer state), `loss` (a function that returns the loss on fixed batches),
    optionally `train` (runs some optimizer steps, then returns the loss) and `levels` (the rules to try by kind). One group of
    tensors is rounded at a time and then restored bit for bit. The sum over groups is a prediction: only a resumed run proves
    it.

    Example:  raystow sensitivity my_run:probe --budget 0.005
    """
    found = measurement.sensitivity(**_arguments(source))
    proposal = found.propose(budget)
    if json:
        emit(_facts(found, proposal, budget))
        return
    steps = "" if found.trained is None else f"; {found.trained:.6g} after the steps of train, +/- {found.noise:.2g}"
    say(f"loss {found.loss:.6g}{steps}", style="bold")
    rows = []
    for t in found.trials:
        rule, change = ("-", "") if t.rule is None else (str(t.rule), f"{t.change:+.2g}")
        rows.append([t.group, rule, size(t.raw), size(t.stored), ratio_text(t.stored, t.raw), change])
    out.print(table("", ["GROUP", "RULE", ">RAW", ">STORED", ">RATIO", ">LOSS"], rows))
    out.print()
    if not proposal.rules:
        say(f"no rule stays within {budget:g}")
        return
    sizes = f"{size(proposal.stored)} of {size(proposal.raw)} (ratio {ratio_text(proposal.stored, proposal.raw)})"
    say(f"within {budget:g}: {sizes}, with a predicted change of {proposal.change:.3g}")
    for line in ("lossy={", *(f'    "{group}": {rule},' for group, rule in proposal.rules.items()), "}"):
        out.print(line)


def _arguments(source: str) -> dict[str, Any]:
    """The result of the user's function; ``loss`` and ``train`` are wrapped so that their errors are reported."""
    module, _, name = source.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise StateError(f"cannot be imported: {error}", subject=source, remedy=_WRITE) from error
    arguments = _call(function, source, _WRITE)
    if not isinstance(arguments, Mapping) or not {"state", "loss"} <= {*arguments} <= {"state", "loss", "train", "levels"}:
        raise StateError(f"returned {arguments!r:.80}", subject=source, remedy=_WRITE)
    if not isinstance(arguments["state"], Mapping):
        raise StateError(f"returned the state {arguments['state']!r:.80}", subject=source, remedy="return a dict of tensors")
    wrapped = {
        name: partial(_number, arguments[name], f"{name} of {source}")
        for name in ("loss", "train")
        if arguments.get(name) is not None
    }
    return {**arguments, **wrapped}


def _number(function: object, subject: str) -> float:
    """Call a function of the user that returns a number."""
    remedy = "write a function without arguments that returns the loss as a number"
    found = _call(function, subject, remedy)
    try:
        return float(found)  # type: ignore[arg-type]  # TypeError is handled
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of more than one element
        raise StateError(f"returned {found!r:.80}", subject=subject, remedy=remedy) from error


def _call(function: object, subject: str, remedy: str) -> object:
    """Call a function of the user; print its traceback if it raises."""
    if not callable(function):
        raise StateError(f"{function!r:.80} is not a function", subject=subject, remedy=remedy)
    try:
        return function()
    except RaystowError:
        raise
    except Exception as error:
        if error.__traceback__ is not None and (within := error.__traceback__.tb_next) is not None:
            typer.echo("".join(traceback.format_tb(within)), err=True, nl=False)
        what = f"called without arguments, it raised {type(error).__name__}: {error}"
        raise StateError(what, subject=subject, remedy=remedy) from error


def _facts(found: Sensitivity, proposal: Proposal, budget: float) -> dict[str, object]:
    trials = [{**fields_of(t), "rule": None if t.rule is None else str(t.rule)} for t in found.trials]
    rules = {group: str(rule) for group, rule in proposal.rules.items()}
    return {**fields_of(found), "trials": trials, "budget": budget, "proposal": {**fields_of(proposal), "rules": rules}}
