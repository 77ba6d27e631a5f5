"""Arguments and options that commands share, and the parsers of values with units: ``6h``, ``2TB``, ``loss:min:3``."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..orchestrator.export.destination import Destination
from ..storage.addresses import local_path
from ..storage.errors import StateError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_BYTES = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_CENTURY = 36525 * 86400  # seconds; clocks cannot wait for some centuries
_MOST = 10**12  # seconds or dollars
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII)


def duration(text: str) -> float:
    """Parse seconds: ``90s``, ``30m``, ``6h``, ``1d``."""
    return _quantity(text, _SECONDS, "a duration, such as 90s, 30m, 6h or 1d", limit=_CENTURY)


def nbytes(text: str) -> int:
    """Parse bytes: ``2TB`` (decimal), ``500GiB`` (binary), ``1000``."""
    return int(_quantity(text, _BYTES, "a size, such as 2TB, 500GiB or 1000000", limit=1 << 63))


def best(text: str) -> tuple[str, str, int]:
    """Parse a metric, ``min`` or ``max``, and a number: ``loss:min:3``. The metric's name may contain colons."""
    metric, *rest = text.rsplit(":", 2)
    if metric and len(rest) == 2 and rest[0] in ("min", "max") and re.fullmatch("[1-9][0-9]{0,8}", rest[1]):
        return metric, rest[0], int(rest[1])
    raise typer.BadParameter(f"{text!r} is not METRIC:min:N or METRIC:max:N, such as loss:min:3")


def stored_ratio(text: str) -> float:
    """Parse stored bytes divided by raw bytes, above 0 and at most 1: ``0.8``; or its inverse: ``1.25x``."""
    found = _NUMBER.fullmatch(text.strip().lower())
    number = float(found[1]) if found is not None and found[2] in ("", "x") else 0.0
    ratio = 1 / number if number and found is not None and found[2] else number
    if not 0 < ratio <= 1:
        raise typer.BadParameter(f"{text!r} is neither stored bytes by raw bytes, such as 0.8, nor a factor, such as 1.25x")
    return ratio


def finite(text: str) -> float:
    """Parse a number that is not negative, and small enough to calculate with."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MOST:
        raise typer.BadParameter(f"{text[:80]!r} is not a finite number from 0 to {_MOST:,}")
    return value


def local(text: str | Path) -> Path:
    """Parse a local path, and refuse an address."""
    try:
        return local_path("it", text)
    except StateError as error:
        raise typer.BadParameter(str(error)) from None


def destination(text: str | Destination) -> Destination:
    """Parse a local path, or an address in an object store."""
    try:
        return text if isinstance(text, Destination) else Destination.parse("it", text)
    except StateError as error:
        raise typer.BadParameter(str(error)) from None


def _quantity(text: str, units: dict[str, int], what: str, *, limit: float) -> float:
    found = _NUMBER.fullmatch(text.strip().lower())
    value = float(found[1]) * units[found[2]] if found is not None and found[2] in units else math.inf
    if not value < limit:
        raise typer.BadParameter(f"{text[:80]!r} is not {what}")
    return value


number = partial(typer.Option, metavar="N", min=1)
gpus = partial(typer.Option, metavar="N", min=0, max=10**9)
time = partial(typer.Option, metavar="TIME", parser=duration)
size = partial(typer.Option, metavar="SIZE", parser=nbytes)
seconds = partial(typer.Option, metavar="SECONDS", parser=finite)
ratio = partial(typer.Option, metavar="RATIO", parser=stored_ratio)
dollars = partial(typer.Option, metavar="USD", parser=finite)
file = partial(typer.Option, metavar="FILE", parser=local)
folder = partial(typer.Option, metavar="DIR", parser=local)
place = partial(typer.Option, metavar="PLACE", parser=destination)
"""Options with a unit. The parser also converts a default, which is text; mypy cannot know that."""

store_price = dollars(help="Price of a GB (10^9 bytes) in the store per month.")
gpu_price = dollars(help="Price of one GPU hour.")

Uri = Annotated[
    str,
    typer.Argument(
        metavar="URI",
        help="Repository: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///path, or a path.",
        show_default=False,
    ),
]
Which = Annotated[str, typer.Argument(metavar="VERSION", help="Version id, pin name, 'step:60', or 'latest'.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would change, and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
