"""Spans of this process, in memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from helpers.replaced_parts import replace_parts


class KeptSpans:
    """A tracer provider of this process for one test, and the spans that have ended."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.exporter, self.provider = InMemorySpanExporter(), TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        replace_parts(patch, [(trace, "get_tracer_provider", lambda: self.provider)])

    @property
    def all(self) -> Sequence[ReadableSpan]:
        """In the order in which they have begun."""
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == f"raystow.{name}"]

    def paths(self) -> set[str]:
        """Each span's name after those of its parents, without "raystow."; "?" for a parent that has not ended."""
        by_id = {span.context.span_id: span for span in self.all}

        def path(span: ReadableSpan) -> str:
            name = span.name.removeprefix("raystow.")
            if span.parent is None:
                return name
            parent = by_id.get(span.parent.span_id)
            return f"{'?' if parent is None else path(parent)}/{name}"

        return {path(span) for span in self.all}
