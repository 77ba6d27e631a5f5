"""How objects look in a notebook: small HTML tables. All text is escaped, since names come from repositories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from html import escape


def size(nbytes: float) -> str:
    """Format bytes in binary units with three digits: ``1.25 GiB``."""
    return in_units(nbytes, 1024, ("KiB", "MiB", "GiB", "TiB", "PiB"))


def in_units(nbytes: float, step: int, units: Sequence[str]) -> str:
    """Format bytes with three digits, in the unit that suits them."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in units:
        nbytes /= step
        if nbytes < 999.5 or unit == units[-1]:
            break
    return f"{nbytes:.{2 if nbytes < 9.995 else 1 if nbytes < 99.95 else 0}f} {unit}"


def moment(created: float) -> str:
    """Format seconds since 1970 as date and time in UTC."""
    return datetime.fromtimestamp(created, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def facts_table(title: str, facts: Mapping[str, object]) -> str:
    """Return a table with a row for each fact that is not empty."""
    rows = ([f"<th style='text-align:left'>{escape(name)}</th>", _cell(value)] for name, value in facts.items() if value != "")
    return _table(title, rows)


def rows_table(title: str, headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with a header."""
    head = [f"<th>{escape(header)}</th>" for header in headers]
    return _table(title, [head, *([_cell(value) for value in row] for row in rows)])


def _cell(value: object) -> str:
    return f"<td>{escape(str(value))}</td>"


def _table(title: str, rows: Iterable[Sequence[str]]) -> str:
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<table><caption style='text-align:left'><b>{escape(title)}</b></caption>{body}</table>"
