"""How commands print numbers, times, names, tables and JSON, and ask for confirmation."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Literal

import msgspec
import typer
from rich.console import Console, ConsoleDimensions
from rich.table import Table

from ..storage.errors import StateError
from ..storage.notebook import in_units
from ..storage.notebook import moment as moment
from ..storage.notebook import size as size

_UNFOLDED = 1 << 16  # columns


class _Output(Console):
    """Folds to the width of the terminal, or to COLUMNS. Without both nothing is folded, so that scripts find a row in a line."""

    @property  # type: ignore[misc]  # the size of a terminal cannot be set
    def size(self) -> ConsoleDimensions:
        found = super().size
        return found if self.is_terminal or "COLUMNS" in os.environ else found._replace(width=_UNFOLDED)


# Names come from repositories: no markup, and ``:skull:`` is no picture. Lines are not wrapped, so that a long name can be
# copied; ``say`` wraps prose, and a table its cells.
out = _Output(markup=False, emoji=False, highlight=False, soft_wrap=True)
err = _Output(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)

_AGES = ((60, 1, "s"), (3600, 60, "min"), (48 * 3600, 3600, "h"), (float("inf"), 86400, "days"))


def billed(nbytes: float) -> str:
    """Format bytes in decimal units with three digits, as stores bill them: ``782 GB``."""
    return in_units(nbytes, 1000, ("kB", "MB", "GB", "TB", "PB"))


def ratio(stored: float, raw: float) -> float | None:
    """Return stored bytes divided by raw bytes, to four digits; None without raw bytes."""
    return round(stored / raw, 4) if raw else None


def ratio_text(stored: int, raw: int) -> str:
    """Format ``ratio`` for a table."""
    return f"{stored / raw:.3f}" if raw else "-"


def age(seconds: float) -> str:
    """Format how long ago something was: ``3 min``. Negative values, of a clock that runs behind, give ``0 s``."""
    unit, name = next((unit, name) for limit, unit, name in _AGES if seconds < limit)
    return f"{max(0, int(seconds // unit))} {name}"


def duration(seconds: float) -> str:
    """Format a duration with three digits in the unit that fits: ``50 ms``, ``2.5 s``, ``83.3 min``."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}" if seconds < 999.5 * unit else f"{seconds / unit:,.0f} {name}"
    return f"{seconds * 1000:.3g} ms" if 0 < seconds < 0.9995 else f"{seconds:.3g} s"


def price(dollars: float) -> str:
    """Format a price with all its digits, at least two after the point."""
    return f"${dollars:,.2f}" if round(dollars, 2) == dollars else f"${dollars:,g}"


def dollars(amount: float) -> str:
    """Format dollars; with cents below 1000."""
    return "under $0.01" if 0 < amount < 0.005 else f"${amount:,.0f}" if amount >= 1000 else f"${amount:,.2f}"


def count(number: int, noun: str) -> str:
    """Format a number with its noun: ``1 tensor``, ``1,024 tensors``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def dimensions(shape: Sequence[int]) -> str:
    """Format a shape: ``3 x 4``; ``scalar`` without dimensions."""
    return " x ".join(str(n) for n in shape) or "scalar"


def printable(text: str) -> str:
    """Escape control characters: names come from repositories and must not control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def table(title: str, headers: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """Return a plain table. A header that begins with ``>`` marks a column of numbers, aligned to the right."""
    grid = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    lines = [[printable(cell) for cell in row] for row in rows]
    least = 0
    for number, header in enumerate(headers):
        name = header.lstrip(">")
        numbers = header != name
        width = max(len(cell) for cell in (name, *(line[number] for line in lines))) if numbers else len(name)
        justify: Literal["right", "left"] = "right" if numbers else "left"
        grid.add_column(name, justify=justify, no_wrap=numbers, overflow="fold", header_style="dim", min_width=width)
        least += width + 2
    if least > out.width:  # the terminal breaks the lines: rich would cut numbers, which then look like others
        grid.width = least
    for line in lines:
        grid.add_row(*line)
    return grid


def say(text: str, *, style: str | None = None) -> None:
    """Print prose: lines break between words only, so that a long name or path stays whole. Control characters are escaped."""
    out.print(textwrap.fill(printable(text), out.width, break_long_words=False, break_on_hyphens=False), style=style)


def emit(facts: Mapping[str, object]) -> None:
    """Print one JSON object; dataclasses and messages in it become objects."""
    typer.echo(json.dumps(facts, indent=2, allow_nan=False, default=fields_of))


def fields_of(row: object) -> dict[str, object]:
    """Return the fields of a dataclass instance or message by name."""
    if isinstance(row, msgspec.Struct):
        return msgspec.structs.asdict(row)
    return {field.name: getattr(row, field.name) for field in fields(row)}  # type: ignore[arg-type]  # TypeError for others


def confirmed(question: str, otherwise: str) -> bool:
    """Ask on stderr for a yes.

    Raises:
        StateError: stdin is at its end or closed; the message ends in ``otherwise``.
    """
    typer.echo(f"{question} [y/N] ", nl=False, err=True)
    try:
        return input().strip().lower() in ("y", "yes")
    except (EOFError, RuntimeError):  # RuntimeError: a stream is closed
        raise StateError(f"there was no answer, so {otherwise}", remedy="pass --yes to skip the question") from None
