"""Source edits match code in any layout and fail unless they match exactly once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from .source_edits import Edit, edited

SOURCE = """
class Counter:
    def step(self, limit):
        if self.total < limit:  # room for one more
            self.total += 1
        elif self.strict:
            raise ValueError(limit)
        def note(n, *more, to=None, level=0):
            print(n, more)
        note(self.total, limit, level=1, to=self)
"""


def new_source(folder: Path, *edits: Edit, source: str = SOURCE) -> str:
    (folder / "counter.py").write_text(source)
    return edited(folder, edits)[Path("counter.py")]


def same(source: str, wanted: str) -> bool:
    return ast.dump(ast.parse(source)) == ast.dump(ast.parse(wanted))


@pytest.mark.parametrize(
    ("pattern", "new", "old_text", "new_text"),
    [
        ("$x.total < $limit", "False", "self.total < limit", "False"),
        ("if $x < $limit: ...", "if True: ...", "self.total < limit", "True"),
        ("$x.total += 1", "", "self.total += 1", "pass"),
        ("note($a, *$b, to=$c, **$d)", "note($c, *$b, **$d)", "self.total, limit, level=1, to=self", "self, limit, level=1"),
        ("^", "return limit", "if self.total < limit:", "return limit\n        if self.total < limit:"),
    ],
)  # fmt: skip
def test_an_edit_replaces_the_code_that_it_matches(tmp_path: Path, pattern: str, new: str, old_text: str, new_text: str) -> None:
    assert same(new_source(tmp_path, Edit("Counter.step", pattern, new)), SOURCE.replace(old_text, new_text))


def test_an_edit_ignores_layout_and_names_of_locals(tmp_path: Path) -> None:
    source = SOURCE.replace("self.total < limit:", "(self.total\n                < bound):").replace("limit", "bound")
    assert "if False:" in new_source(tmp_path, Edit("Counter.step", "$x.total < $limit", "False"), source=source)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Edit("Counter.gone", "1", "2"), "defined 0 times"),
        (Edit("other:Counter.step", "1", "2"), "defined 0 times"),
        (Edit("Counter.step", "$x.sum < $limit", "False"), "found 0 times"),
        (Edit("Counter.step", "$x.total", "0"), "found 3 times"),
        (Edit("Counter.step", "$x < $limit", "seconds"), "does not have"),
        (Edit("Counter.step", "$x < $limit", "$other"), "is in no pattern"),
    ],
)
def test_an_edit_that_does_not_match_once_is_rejected(tmp_path: Path, edit: Edit, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        new_source(tmp_path, edit)
