"""The marker: the object that makes a store a repository. It has the repository's id, and whose signatures versions must have."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import Damaged
from . import keys, records
from .signature import PublicKey


@dataclass(frozen=True)
class Marker:
    """``created``: seconds since 1970. ``signed_by``: the keys with which versions must be signed; none if they need not be."""

    repository: str
    created: float = 0.0
    signed_by: tuple[PublicKey, ...] = ()

    def dump(self) -> bytes:
        """The bytes of ``raystow.json``."""
        signed_by = {"signed_by": [key.raw.hex() for key in self.signed_by]} if self.signed_by else {}
        return records.dump({"repository": self.repository, "created": self.created, **signed_by}, keys.MARKER)

    @staticmethod
    def load(data: bytes) -> Marker:
        """Parse and check ``raystow.json``. ``created`` is for people and not read."""
        fields = records.load(data, keys.MARKER)
        texts = records.texts(fields, "signed_by", keys.MARKER) if "signed_by" in fields else None
        if texts is not None and not (texts and all(map(records.DIGEST.fullmatch, texts))):
            raise Damaged("field 'signed_by' is not a list of public keys", subject=keys.MARKER)
        signed_by = tuple(PublicKey(bytes.fromhex(text)) for text in texts or ())
        return Marker(records.field(fields, "repository", str, keys.MARKER), signed_by=signed_by)
