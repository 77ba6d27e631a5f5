"""How numbers, times and names look to a person, and the one way to print JSON. Knows nothing of what it prints."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

out = Console(markup=False, highlight=False)
err = Console(stderr=True, markup=False, highlight=False)

_AGES = ((60, 1, "s"), (3600, 60, "min"), (48 * 3600, 3600, "h"), (float("inf"), 86400, "days"))


def size(nbytes: float) -> str:
    """Bytes in binary units with three digits: ``1.25 GiB``."""
    return _in_units(nbytes, 1024, ("KiB", "MiB", "GiB", "TiB", "PiB"))


def billed(nbytes: float) -> str:
    """Bytes in decimal units with three digits, as stores bill them and links are sold: ``782 GB``."""
    return _in_units(nbytes, 1000, ("kB", "MB", "GB", "TB", "PB"))


def _in_units(nbytes: float, step: int, units: Sequence[str]) -> str:
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in units:
        nbytes /= step
        if nbytes < 999.5 or unit == units[-1]:
            break
    return f"{nbytes:.{2 if nbytes < 9.995 else 1 if nbytes < 99.95 else 0}f} {unit}"


def ratio(stored: int, raw: int) -> float | None:
    """Stored bytes for each raw one, to four digits; None where there are none."""
    return round(stored / raw, 4) if raw else None


def ratio_text(stored: int, raw: int) -> str:
    """``ratio`` for a table."""
    return f"{stored / raw:.3f}" if raw else "-"


def age(seconds: float) -> str:
    """How long ago: ``3 min``. A clock that runs behind gives ``0 s``."""
    unit, name = next((unit, name) for limit, unit, name in _AGES if seconds < limit)
    return f"{max(0, int(seconds // unit))} {name}"


def moment(created: float) -> str:
    """Seconds since 1970 as a date and time."""
    return datetime.fromtimestamp(created, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def price(dollars: float) -> str:
    """As it was given, but at least with cents."""
    return f"${dollars:,.2f}" if round(dollars, 2) == dollars else f"${dollars:,g}"


def count(number: int, noun: str) -> str:
    """``1 tensor``, ``1,024 tensors``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def printable(text: str) -> str:
    """``text`` with control characters escaped: names come out of repositories, and must not steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def table(title: str, headers: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A plain table. A header that begins with ``>`` is of a column of numbers, aligned to the right."""
    grid = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in headers:
        numbers = header.startswith(">")
        justify = "right" if numbers else "left"
        grid.add_column(header.lstrip(">"), justify=justify, no_wrap=numbers, overflow="fold", header_style="dim")  # type: ignore[arg-type]
    for row in rows:
        grid.add_row(*(printable(cell) for cell in row))
    return grid


def say(text: str, *, style: str | None = None) -> None:
    """Print prose: lines end between words, and a name or path that is longer than a line stays whole."""
    lines = textwrap.fill(text, out.width, break_long_words=False, break_on_hyphens=False)
    out.print(lines, style=style, soft_wrap=True)


def emit(fields: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    typer.echo(json.dumps(fields, indent=2, allow_nan=False))
