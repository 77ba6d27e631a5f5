"""Spans of OpenTelemetry, and the one way to make them. Without a tracer provider a span costs a microsecond and is dropped.

A span's ``trace`` is its context as text (W3C Trace Context, ``traceparent``), which messages carry to other processes. Nothing
here imports OpenTelemetry, or raises: a provider is the user's, and no save fails because of it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from types import ModuleType

from ..._version import __version__
from .clock import SYSTEM

logger = logging.getLogger(__name__)

ROOT = "root"
"""Instead of a parent: the span begins a trace of its own."""

_SAMPLED = 1
_refused = set[str]()  # errors, each of which is logged once


class Span:
    """A span that has begun; it ends once, on this thread or another.

    Attributes:
        trace: Its context, for children; without a provider that of its parent.
    """

    def __init__(self, name: str, parent: str | None = None, *, begun: float | None = None, **attributes: object) -> None:
        """Begin a span.

        Args:
            name: Without "raystow.", which precedes it.
            parent: The ``trace`` of the parent, or ``ROOT``. None: the current span of this thread, if there is one. "": the
                parent is not traced, and neither is this span.
            begun: When it began, in monotonic seconds. None: now.
            attributes: By name without "raystow."; those that are None are left out.
        """
        self.trace, self._span = parent or "", None
        if parent == ROOT:
            self.trace = ""
        if parent == "" or (trace := _api()) is None:
            return
        with _quiet():
            context = None if parent is None else _context(trace, parent)
            tracer = trace.get_tracer_provider().get_tracer("raystow", __version__)
            self._span = tracer.start_span(f"raystow.{name}", context, attributes=_named(attributes), start_time=_time(begun))
            self.trace = _text(trace, self._span)

    def end(self, error: object = "", *, at: float | None = None, **attributes: object) -> None:
        """End it, unless it has ended. ``error``: why it failed. ``at``: when, in monotonic seconds."""
        span, self._span = self._span, None
        if span is None or (trace := _api()) is None:
            return
        with _quiet():
            span.set_attributes(_named(attributes))
            if error:
                span.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
            span.end(_time(at))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make it the parent of spans that begin without one on this thread."""
        span, trace = self._span, _api()
        if span is None or trace is None:
            yield
        else:
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield


NO_SPAN = Span("none", "")
"""What is not traced."""


@contextlib.contextmanager
def span(name: str, parent: str | None = None, *, begun: float | None = None, **attributes: object) -> Iterator[Span]:
    """Make a span of what runs within; it is the current span of this thread. Arguments: those of ``Span``."""
    made = Span(name, parent, begun=begun, **attributes)
    try:
        with made.current():
            yield made
    except BaseException as error:
        made.end(error or repr(error))
        raise
    made.end()


def here() -> str:
    """Return the context of the current span of this thread; "" if there is none."""
    found = ""
    if (trace := _api()) is not None:
        with _quiet():
            found = _text(trace, trace.get_current_span())
    return found


def _api() -> ModuleType | None:
    """OpenTelemetry's API, if this process has a tracer provider."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    with _quiet():
        none = trace.ProxyTracerProvider, trace.NoOpTracerProvider
        return None if isinstance(trace.get_tracer_provider(), none) else trace
    return None


def _context(trace: ModuleType, parent: str) -> object:
    empty = sys.modules["opentelemetry.context"].Context()
    if parent == ROOT:
        return empty
    _, trace_id, span_id, flags = parent.split("-")
    remote = trace.SpanContext(int(trace_id, 16), int(span_id, 16), True, trace.TraceFlags(int(flags, 16) & _SAMPLED))
    return trace.set_span_in_context(trace.NonRecordingSpan(remote), empty)


def _text(trace: ModuleType, span: object) -> str:
    context = span.get_span_context()  # type: ignore[attr-defined]
    if not context.is_valid:
        return ""
    return f"00-{trace.format_trace_id(context.trace_id)}-{trace.format_span_id(context.span_id)}-{context.trace_flags:02x}"


def _named(attributes: dict[str, object]) -> dict[str, object]:
    return {f"raystow.{name}": value for name, value in attributes.items() if value is not None}


def _time(moment: float | None) -> int | None:
    """Monotonic seconds as nanoseconds since 1970."""
    return None if moment is None else int((SYSTEM.now() - SYSTEM.monotonic() + moment) * 1e9)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Log errors of a provider or its processors, each once."""
    try:
        yield
    except Exception as error:
        text = repr(error)
        if len(_refused) < 100 and text not in _refused:
            _refused.add(text)
            logger.exception("a span could not be recorded; if this repeats, it is not logged again")
