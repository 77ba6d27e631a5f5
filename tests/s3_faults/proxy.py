"""A proxy between S3 clients and an S3 server that injects faults of networks and busy servers into requests.

    with FaultProxy("127.0.0.1", 7480) as proxy:
        rule = proxy.inject(Fault.LOSE_ANSWER, "PUT", r"root\\.json")
        ...                                          # clients use proxy.endpoint
        assert rule.hits == 1

HTTP/1.1 without TLS, one thread, any number of connections. A request without a rule passes unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from dataclasses import dataclass

from s3_faults.faults import Fault, Rule
from s3_faults.http_message import BLOCK, Broken, Damage, Head, body, drop, head, send, spoilt

_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_TO_REQUEST = {Fault.CORRUPT_REQUEST: Damage.CORRUPT, Fault.RESET_REQUEST: Damage.BREAK}
_TO_ANSWER = {Fault.CORRUPT_ANSWER: Damage.CORRUPT, Fault.STALL_ANSWER: Damage.STALL, Fault.RESET_ANSWER: Damage.BREAK}


class FaultProxy:
    """A proxy that listens on a free local port until the ``with`` block ends."""

    def __init__(self, host: str, port: int) -> None:
        self._upstream = host, port
        self._rules: list[Rule] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._port = 0

    @property
    def endpoint(self) -> str:
        """The address for clients."""
        return f"http://127.0.0.1:{self._port}"

    def inject(
        self,
        fault: Fault,
        method: str = ".*",
        path: str = "",
        *,
        times: int = 1,
        skip: int = 0,
        at: int = 100,
        seconds: float = 1,
    ) -> Rule:
        """Add a rule; the first rule that matches a request applies. ``method`` and ``path`` are regular expressions."""
        rule = Rule(fault, method, re.compile(path), times, skip, at, seconds)
        self._rules.append(rule)
        return rule

    def heal(self) -> None:
        """Delete all rules. Stalled requests stay stalled."""
        self._rules.clear()

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=BLOCK), self._loop)
        self._port = server.result(10).sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)  # asyncio has only weak references to tasks, and a stalled one would be collected
        client = _Side(reader, writer)
        sides = [client]
        try:
            server = _Side(*await asyncio.open_connection(*self._upstream, limit=BLOCK))
            sides.append(server)
            while True:
                request = await head(client.reader)
                rule = next((rule for rule in self._rules if rule.takes(request.first[0], request.first[1])), None)
                await _exchange(request, rule, client, server)
        except Broken:
            for side in sides:
                _reset(side.writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one side closed its connection, or the test ended
        finally:
            self._tasks.discard(task)
            for side in sides:
                side.writer.close()


@dataclass(frozen=True)
class _Side:
    """A connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


async def _exchange(request: Head, rule: Rule | None, client: _Side, server: _Side) -> None:
    """Forward one request and its answer, with the fault of the rule."""
    fault, at = (rule.fault, rule.at) if rule else (None, 0)
    if fault is Fault.STALL_REQUEST:
        await asyncio.Event().wait()
    if "expect" in request.fields:  # the client waits for this answer, and some servers do not send it
        client.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if fault is Fault.SLOW_DOWN:
        await drop(body(client.reader, request))
        await _slow_down(request, client.writer)
        raise ConnectionAbortedError
    server.writer.write(request.without("expect"))
    await send(spoilt(body(client.reader, request), fault and _TO_REQUEST.get(fault), at), server.writer)
    answer = await head(server.reader)
    # These answers have no body, regardless of their length field.
    bare = request.first[0] == "HEAD" or answer.first[1] in ("204", "304")
    content = body(server.reader, Head(answer.raw, answer.first, {}) if bare else answer)
    if fault is Fault.LOSE_ANSWER:
        await drop(content)
        raise Broken
    if rule and fault is Fault.DELAY:
        await asyncio.sleep(rule.seconds)  # the fault is a slow answer
    client.writer.write(answer.raw)
    await send(spoilt(content, fault and _TO_ANSWER.get(fault), at), client.writer)


async def _slow_down(request: Head, writer: asyncio.StreamWriter) -> None:
    fields = f"Content-Type: application/xml\r\nContent-Length: {len(_SLOW_DOWN)}\r\nConnection: close"
    content = b"" if request.first[0] == "HEAD" else _SLOW_DOWN
    writer.write(f"HTTP/1.1 503 Slow Down\r\n{fields}\r\n\r\n".encode() + content)
    await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset instead of a normal end."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
