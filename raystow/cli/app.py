"""Builds the command line. Only the commands that need Ray, torch, plotly or Jinja import them, when they run."""

from __future__ import annotations

import importlib
import io
import sys
from keyword import iskeyword
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from .._version import __version__
from .exit_codes import EXIT_CODES, print_error, reporting
from .interrupts import end_by_closed_pipe, interruptible, say_interrupted
from .wait_notice import say_what_is_awaited

COMMANDS = {
    "Get started": {"demo": "..demo.command", "doctor": ".doctor", "keygen": ".keygen"},
    "Inspect and export versions": {
        "ls": ".ls",
        "log": ".log",
        "show": ".show",
        "diff": ".diff",
        "verify": ".verify",
        "restore": ".restore",
        "export": ".export",
        "import": ".import_command",
        "cp": ".cp",
        "plan": ".plan",
    },
    "Keep, drop and repair versions": {
        "pin": ".pin",
        "unpin": ".pin",
        "rollback": ".rollback",
        "prune": ".prune",
        "compact": ".compact",
        "gc": ".gc",
        "repair": ".repair",
    },
    "Measure and report": {"advise": ".advise", "cost": ".cost", "report": ".report"},
    "Watch and drain a cluster": {"top": ".top", "drain": ".drain"},
}
"""Help panel -> command -> the module with the function of that name (``import_`` for the keyword), in the order of the help."""


def _without_types(params: Any) -> Any:
    """Hide the types that typer prints where they say nothing: ``<bool>`` of a flag, ``<str>`` of an argument."""
    for param in params:
        if isinstance(param, TyperArgument):
            param.display_type_rich = lambda ctx: ""  # type: ignore[method-assign]
        elif param.is_flag:
            param.metavar = ""
    return params


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> Any:
        return _without_types(super().get_params(ctx))


class _Group(TyperGroup):
    def main(self, *args: Any, **options: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):  # help, names and paths may have characters that the terminal's encoding lacks
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        return super().main(*args, **options)

    def get_params(self, ctx: Any) -> Any:
        return _without_types(super().get_params(ctx))


def build() -> typer.Typer:
    """Return the application with all commands."""
    app = typer.Typer(
        name="raystow",
        cls=_Group,
        callback=_root,
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Exit codes: " + ", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
    )
    for panel, commands in COMMANDS.items():
        for name, module in commands.items():
            function = getattr(importlib.import_module(module, __package__), name + "_" * iskeyword(name))
            app.command(name, cls=_Command, rich_help_panel=panel)(reporting(function))
    return app


def main() -> None:
    """Run the command line of this process. SIGTERM and SIGHUP interrupt it as Ctrl-C does, so that commands clean up."""
    interruptible()
    say_what_is_awaited()
    try:
        build()(prog_name="raystow")
    except KeyboardInterrupt:  # before the command began
        say_interrupted()
        sys.exit(130)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich and typer make it an exit with 1
            end_by_closed_pipe()
        raise
    except OSError as error:  # help or JSON could not be written
        print_error(error)
        sys.exit(1)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"raystow {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version of raystow.")
    ] = False,
) -> None:
    """Inspect, verify, export and maintain the checkpoints of a run.

    A repository is the place that a run saves to; each durable save is a version in it. Reading needs no Ray cluster, no GPU and
    no torch. S3 endpoint, region and credentials come from the usual AWS variables and profile.

    Example:  raystow ls s3://bucket/runs/llama
    """
