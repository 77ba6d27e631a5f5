"""The requests that a command says it waits for."""

from __future__ import annotations

from collections.abc import Iterator

from raystow.storage.stores.awaited import Awaited, awaiting, each, oldest


def test_an_item_is_awaited_only_until_it_is_there() -> None:
    waited = []

    def pages() -> Iterator[int]:
        for page in range(2):
            waited.append(oldest())
            yield page

    for _ in each(pages(), lambda: awaiting(Awaited("LIST", "s3://bucket/run", "", 70.0))):
        assert oldest() is None
    assert [request.operation for request in waited if request] == ["LIST", "LIST"]


def test_the_oldest_of_several_requests_is_named() -> None:
    with awaiting(Awaited("GET", "s3://bucket/a", "", 70.0)), awaiting(Awaited("GET", "s3://bucket/b", "", 70.0)):
        first = oldest()
    assert first is not None
    assert first.subject == "s3://bucket/a"
    assert oldest() is None
