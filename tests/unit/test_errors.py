"""The tree of errors: drawn in the module's docstring, and each error survives pickling."""

from __future__ import annotations

import inspect
import pickle  # noqa: TID251  # as Ray sends errors
import re

import pytest

from raystow.storage import errors
from raystow.storage.errors import RaystowError

TREE = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, RaystowError)]


@pytest.mark.parametrize("kind", TREE)
def test_an_error_survives_pickling(kind: type[RaystowError]) -> None:
    error = kind("it is cut", subject="versions/1", remedy="use another")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.what, again.subject, again.remedy) == ("it is cut", "versions/1", "use another")
    assert str(again) == str(error) == "versions/1: it is cut (use another)"


def test_every_error_is_drawn_below_its_base() -> None:
    drawn: dict[str, str] = {}
    path: list[str] = []
    for indent, name in re.findall(r"^    ([│├└─ ]*)(\w+)", errors.__doc__ or "", re.MULTILINE):
        depth = len(indent) // 4
        path[depth:] = [name]
        drawn[name] = path[depth - 1] if depth else "Exception"
    assert drawn == {kind.__name__: kind.__bases__[0].__name__ for kind in TREE}
