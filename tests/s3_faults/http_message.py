"""Heads and bodies of HTTP/1.1 messages, and damage to a body."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass

BLOCK = 1 << 16


class Broken(Exception):
    """The connection must end with a reset."""


class Damage(enum.Enum):
    """A kind of damage to a body."""

    CORRUPT = enum.auto()
    STALL = enum.auto()
    BREAK = enum.auto()


@dataclass(frozen=True)
class Head:
    """The first lines of a request or an answer."""

    raw: bytes
    first: list[str]
    fields: dict[str, str]

    def without(self, name: str) -> bytes:
        """Return the raw lines without those of one field."""
        first, *lines = self.raw.split(b"\r\n")
        return b"\r\n".join([first, *(line for line in lines if not line.lower().startswith(name.encode() + b":"))])


async def head(reader: asyncio.StreamReader) -> Head:
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *lines = raw[:-4].decode("latin1").split("\r\n")
    fields = dict(line.split(":", 1) for line in lines)
    return Head(raw, first.split(" ", 2), {name.strip().lower(): value.strip() for name, value in fields.items()})


async def body(reader: asyncio.StreamReader, head: Head) -> AsyncIterator[bytes]:
    """Yield the bytes of a body as they are sent, including the frames of a chunked body."""
    left = int(head.fields.get("content-length", 0))
    if "chunked" in head.fields.get("transfer-encoding", ""):
        while size := int((frame := await reader.readuntil(b"\n")).split(b";")[0], 16):
            yield frame + await reader.readexactly(size + 2)
        yield frame
        while (line := await reader.readuntil(b"\n")) != b"\r\n":
            yield line
        yield line
        return
    while left:
        block = await reader.read(min(BLOCK, left))
        if not block:
            raise ConnectionAbortedError
        left -= len(block)
        yield block


async def spoilt(body: AsyncIterator[bytes], damage: Damage | None, at: int) -> AsyncIterator[bytes]:
    """Yield the body with the damage at byte ``at``."""
    begin = 0
    async for block in body:
        if begin <= at < begin + len(block):
            if damage is Damage.CORRUPT:
                block = block[: at - begin] + bytes([block[at - begin] ^ 0xFF]) + block[at - begin + 1 :]
            elif damage is not None:
                yield block[: at - begin]
                if damage is Damage.STALL:
                    await asyncio.Event().wait()
                raise Broken
        begin += len(block)
        yield block


async def send(body: AsyncIterator[bytes], writer: asyncio.StreamWriter) -> None:
    async for block in body:
        writer.write(block)
        await writer.drain()
    await writer.drain()


async def drop(body: AsyncIterator[bytes]) -> None:
    async for _ in body:
        pass
