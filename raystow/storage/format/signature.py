"""Signatures of the records of versions and segments, for readers who do not trust every writer of the store.

A version's record has the digests of fragments, and these the digests of chunks: so a signature of the record's digest covers
the version, and one of a segment's record its entries. It does not cover the root: which version is the newest, or pinned.
See docs/security.md.

``cryptography`` is imported only where a signature is made or checked: without keys nothing needs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from .. import extras
from ..coding.digest import stored_digest
from ..errors import NotFound, Unsupported, Untrusted
from ..limits import MAX_SIGNATURE
from ..object_store import ObjectStore
from . import keys, records

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ALGORITHM = "ed25519"
_SIGNATURE = re.compile(r"[0-9a-f]{128}")


@dataclass(frozen=True)
class RecordKind:
    """What is signed. ``key``: of the signature, from number and attempt. ``domain``: begins what is signed, so that a signature
    is valid for no other kind."""

    name: str
    domain: bytes
    key: Callable[[int, str], str]


VERSION = RecordKind("version", b"raystow version record 1", keys.signature)
SEGMENT = RecordKind("segment", b"raystow segment record 1", keys.segment_signature)


@dataclass(frozen=True)
class PublicKey:
    """An Ed25519 public key: its 32 bytes."""

    raw: bytes

    @property
    def id(self) -> str:
        """The first 16 hexadecimal digits of its BLAKE3: a short name, on which no decision rests."""
        return stored_digest(self.raw).hex()[:16]

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Whether ``signature`` is this key's over ``message``."""
        with extras.named():
            from cryptography.exceptions import InvalidSignature
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class Trust:
    """The public keys of trusted writers; without keys every version is accepted."""

    keys: tuple[PublicKey, ...] = ()

    def check(
        self, store: ObjectStore, repository: str, id: int, attempt: str, digest: bytes, kind: RecordKind = VERSION
    ) -> None:
        """Raise ``Untrusted`` unless a trusted key has signed the record with this digest. One read; none without keys."""
        if not self.keys:
            return
        key = kind.key(id, attempt)
        try:
            fields = records.load(store.get(key, max_bytes=MAX_SIGNATURE), key)
        except NotFound:
            raise _refused(f"{kind.name} {id} is not signed", key) from None
        signer, algorithm, text = (records.field(fields, name, str, key) for name in ("key", "algorithm", "signature"))
        if algorithm != ALGORITHM:
            raise Unsupported(f"signed with {algorithm!r:.40}", subject=key, remedy="upgrade raystow")
        named = [public for public in self.keys if public.id == signer]
        if not named:
            raise _refused(f"signed with key {signer!r:.40}; trusted are {self}", key)
        message = _message(repository, id, attempt, digest, kind)
        if not _SIGNATURE.fullmatch(text) or not any(public.verifies(bytes.fromhex(text), message) for public in named):
            raise _refused(f"the signature is not that of key {signer} over {kind.name} {id}", key)

    def admit(self, signer: Signer | None) -> None:
        """Raise ``Untrusted`` unless ``check`` would accept what ``signer`` signs; None signs nothing."""
        if not self.keys or (signer is not None and signer.public in self.keys):
            return
        what = f"the signing key here is {signer.public.id}" if signer is not None else "no signing key is set here"
        raise Untrusted(
            f"{what}, and only versions signed with {self} would be read",
            remedy="set RAYSTOW_SIGNING_KEY to such a key where versions are written: for saves on the head node",
        )

    def __str__(self) -> str:
        return ", ".join(public.id for public in self.keys) or "all"


class Signer:
    """A private key. It shows its public half only, and cannot be pickled: so Ray cannot send it."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = PublicKey(private.public_key().public_bytes_raw())

    def __repr__(self) -> str:
        return f"Signer({self.public.id})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a private key does not leave its process")

    def sign(self, repository: str, id: int, attempt: str, digest: bytes, kind: RecordKind = VERSION) -> bytes:
        """The bytes of ``version.sig`` or ``segment.sig`` for the record with this BLAKE3 digest."""
        signature = self._private.sign(_message(repository, id, attempt, digest, kind))
        fields = {"key": self.public.id, "algorithm": ALGORITHM, "signature": signature.hex()}
        return records.dump(fields, kind.key(id, attempt))


def _message(repository: str, id: int, attempt: str, digest: bytes, kind: RecordKind) -> bytes:
    # The record names repository, id and attempt as well. Here they let a signature be checked before the record is parsed.
    return b"\0".join([kind.domain, repository.encode("utf-8", "surrogatepass"), str(id).encode(), attempt.encode(), digest])


def _refused(what: str, key: str) -> Untrusted:
    return Untrusted(what, subject=key, remedy="find out who wrote it; if you know its key, add it to RAYSTOW_TRUSTED_KEYS")
