"""The error classes: the docstring of the module draws their tree, and each error survives pickling."""

from __future__ import annotations

import inspect
import pickle  # noqa: TID251  # as Ray sends errors
import re

import pytest
from botocore.exceptions import EndpointConnectionError

from raystow.storage import errors
from raystow.storage.errors import RaystowError, StoreUnavailable
from raystow.storage.stores.s3_errors import ANSWERS, boto_errors

TREE = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, RaystowError)]


@pytest.mark.parametrize("kind", TREE)
def test_an_error_survives_pickling(kind: type[RaystowError]) -> None:
    error = kind("it is cut", subject="versions/1", remedy="use another")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.what, again.subject, again.remedy) == ("it is cut", "versions/1", "use another")
    assert str(again) == str(error) == "versions/1: it is cut (use another)"


def test_the_docstring_draws_every_error_below_its_base() -> None:
    drawn: dict[str, str] = {}
    path: list[str] = []
    for indent, name in re.findall(r"^    ([│├└─ ]*)(\w+)", errors.__doc__ or "", re.MULTILINE):
        depth = len(indent) // 4
        path[depth:] = [name]
        drawn[name] = path[depth - 1] if depth else "Exception"
    assert drawn == {kind.__name__: kind.__bases__[0].__name__ for kind in TREE}


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("http://10.0.0.7:9000/bucket/key?X-Amz-Signature=abc", "(http://10.0.0.7:9000 does not answer)"),
        ("https://s3.example.org/bucket", "(https://s3.example.org does not answer)"),
        ("http://user:secret@host:9000/bucket", ""),
    ],
)
def test_an_endpoint_that_does_not_answer_is_named(url: str, named: str) -> None:
    """The error omits the parts of the URL that may be secret."""
    with pytest.raises(StoreUnavailable) as refused, boto_errors("GET", "s3://bucket/root.json"):
        raise EndpointConnectionError(endpoint_url=url)
    assert str(refused.value).startswith(
        f"s3://bucket/root.json: GET failed: EndpointConnectionError{named and ' ' + named} (check"
    )
    assert not any(secret in str(refused.value) for secret in ("abc", "secret"))
    with pytest.raises(StoreUnavailable) as refused, ANSWERS.obstore_errors("PUT", "s3://bucket/root.json"):
        raise OSError(f"error sending request for url ({url}) kind: Connect")
    assert named in str(refused.value)
    assert not any(secret in str(refused.value) for secret in ("abc", "secret"))
