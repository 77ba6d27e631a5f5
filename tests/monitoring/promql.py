"""The series, labels and aggregations in a PromQL expression."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import promql_parser

_PARTS = ("lhs", "rhs", "expr", "vector_selector")


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the name and the matched labels of each selected series."""
    for node in _nodes(promql_parser.parse(expression)):
        if isinstance(node, promql_parser.VectorSelector):
            yield str(node.name), {matcher.name for matcher in node.matchers.matchers}


def grouped(expression: str) -> Iterator[tuple[set[str], set[str]]]:
    """Yield the series and the kept labels of each aggregation."""
    for node in _nodes(promql_parser.parse(expression)):
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            names = {str(part.name) for part in _nodes(node) if isinstance(part, promql_parser.VectorSelector)}
            yield names, set(node.modifier.labels)


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for part in [getattr(node, name) for name in _PARTS if hasattr(node, name)] + list(getattr(node, "args", [])):
        yield from _nodes(part)
