"""The call paths that docstrings list lead through functions that exist, and are short enough to be followed."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

import pytest

from raystow.orchestrator import client, restore

MOST = 14
"""Functions of a call path."""


@pytest.mark.parametrize("module", [client, restore], ids=["save", "restore"])
def test_a_listed_call_path_has_few_functions_which_exist(module: ModuleType) -> None:
    listed = re.findall(r"^ +((?:orchestrator|workers|state|storage)(?:\.\w+)+)", module.__doc__ or "", re.M)
    assert 10 <= len(listed) <= MOST
    for name in listed:
        path = re.sub(r"\.(?=[A-Z])", ":", name) if re.search(r"\.[A-Z]", name) else ":".join(name.rsplit(".", 1))
        within, _, attributes = path.partition(":")
        found: object = importlib.import_module(f"raystow.{within}")
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
        assert callable(found)
