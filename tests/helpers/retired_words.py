"""Words of earlier texts that documents, docstrings and comments do not use any more."""

from __future__ import annotations

import re

RETIRED = re.compile(
    r"\b(floors?|rooms?|houses?|doors?|desks?|sevens|former|farewell|vouched|patient|beside|stands in|lies with|"
    r"as it comes|wanted|whoever|what is there to|in the midst of|makes of|all in all|spoken for|sliver|borrowers?|told)\b",
    re.IGNORECASE,
)
