"""The table of limits in the specification equals the limits in the code."""

from __future__ import annotations

import re
from pathlib import Path

from raystow.storage import limits
from raystow.storage.format import records

SPEC = (Path(__file__).parents[4] / "docs" / "spec" / "format-v1.md").read_text()
UNITS = {"": 1, " KiB": 1 << 10, " MiB": 1 << 20, " GiB": 1 << 30}


def number(text: str) -> int:
    """Parse a limit such as ``64 MiB``, ``1,024``, or ``2^63 - 1``."""
    power, digits, unit = re.fullmatch(r"(\d+\^\d+) - 1|([\d,]+)( [KMG]iB)?", text).groups()
    if power:
        base, exponent = power.split("^")
        return int(base) ** int(exponent) - 1
    return int(digits.replace(",", "")) * UNITS[unit or ""]


def test_the_limits_of_the_specification_equal_the_code() -> None:
    section = SPEC.partition("## Limits\n")[2].partition("\n## ")[0]
    table = {
        f"MAX_{name.upper()}": number(most) for name, most in re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.MULTILINE)
    }
    assert table == {name: value for name, value in vars(limits).items() if name.startswith("MAX_")}


def test_every_record_has_a_limit() -> None:
    section = SPEC.partition("## Limits\n")[2].partition("\n## ")[0]
    assert set(records.LIMITS) == set(re.findall(r"`(\w+\.(?:json|sig))`", section))
