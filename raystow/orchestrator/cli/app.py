"""Puts the commands together. Their modules import what is heavy when they run, so that help and completion are quick."""

from __future__ import annotations

import importlib
import sys
from keyword import iskeyword
from typing import Annotated

import typer

from ... import __version__
from .reporting import EXIT_CODES, reporting

_COMMANDS = {
    "Begin": {"demo": "..demo.command", "doctor": ".doctor", "keygen": ".keygen"},
    "Look at versions, and take them out": {
        "ls": ".ls",
        "show": ".show",
        "diff": ".diff",
        "verify": ".verify",
        "restore": ".restore",
        "import": ".importing",
        "plan": ".plan",
    },
    "Keep, drop and mend": {
        "pin": ".pin",
        "unpin": ".pin",
        "prune": ".prune",
        "compact": ".compact",
        "gc": ".gc",
        "repair": ".repair",
    },
    "Weigh what checkpoints cost": {"cost": ".cost", "sensitivity": ".sensitivity", "report": ".report.command"},
    "On the cluster": {"top": ".top", "drain": ".drain"},
}
"""What they are for -> command -> the module that holds the function of that name, in the order of the help; ``import_`` for a
keyword."""


def build() -> typer.Typer:
    """The application with all its commands."""
    app = typer.Typer(
        name="raystow",
        callback=_root,
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Exit codes: " + ", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
    )
    for purpose, commands in _COMMANDS.items():
        for name, home in commands.items():
            function = getattr(importlib.import_module(home, __package__), name + "_" * iskeyword(name))
            app.command(name, rich_help_panel=purpose)(reporting(function))
    return app


def main() -> None:
    """Run the command line of this process."""
    try:
        build()(prog_name="raystow")
    except KeyboardInterrupt:  # before the command has begun
        typer.echo("interrupted", err=True)
        sys.exit(130)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"raystow {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print raystow's version.")
    ] = False,
) -> None:
    """Checkpoints for training on Ray: look at them, check them, take them out.

    Reading needs no Ray cluster and no GPU. An S3 endpoint, region and credentials come from the usual AWS variables and profile.

    Example:  raystow ls s3://bucket/runs/llama
    """
