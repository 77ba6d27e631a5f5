"""The question that a command asks before it changes what cannot be brought back."""

from __future__ import annotations

import typer

from ...storage.errors import StateError


def agreed(question: str, otherwise: str) -> bool:
    """Ask on stderr. Where nobody can answer, ``StateError`` says what is so ``otherwise``."""
    typer.echo(f"{question} [y/N] ", nl=False, err=True)
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        raise StateError(f"nobody answers, so {otherwise}", remedy="--yes does it without asking") from None
