"""Keys in files: where the private one is named, which public ones this process trusts, and how a new pair is written.

The environment names files and never holds a key, so no key reaches a process list, a log or Ray's runtime environments. What is
set but cannot be used is an error: nobody should believe in a check that does not take place.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from .. import extras
from ..addresses import local_path
from ..errors import StateError
from .signature import PublicKey, Signer, Trust

SIGNING_KEY = "RAYSTOW_SIGNING_KEY"
"""Names the file with the private key that a coordinator signs with."""
TRUSTED_KEYS = "RAYSTOW_TRUSTED_KEYS"
"""Names a file with public keys, or a folder of such files (``*.pub``): whose versions a reader takes."""

_LARGEST = 1 << 20  # bytes of a file with keys
_BEGIN, _DASHES = b"-----BEGIN ", b"-----"


def signer() -> Signer | None:
    """The signer whose key the environment names; None if it names none.

    ``StateError`` unless the file is of this user, who alone can read it, and holds an Ed25519 key (PEM, PKCS 8, without a
    password).
    """
    path = _named(SIGNING_KEY)
    if path is None:
        return None
    with extras.named():
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read(path, private=True)
    try:
        private = load_pem_private_key(data, None)
    except (TypeError, ValueError, UnsupportedAlgorithm):
        private = None
    if not isinstance(private, Ed25519PrivateKey):
        what = "holds no Ed25519 private key (PEM, without a password)"
        raise StateError(what, subject=str(path), remedy="`raystow keygen FILE` makes one")
    return Signer(private)


def trust(path: str | os.PathLike[str] | None = None) -> Trust | None:
    """The public keys in the file or folder ``path``, or in the one that the environment names; None if neither is given.

    ``StateError`` if there is no key, or something else than Ed25519 public keys (PEM).
    """
    place = _named(TRUSTED_KEYS) if path is None else local_path("trusted_keys", path)
    if place is None:
        return None
    try:
        files = sorted(place.glob("*.pub")) if place.is_dir() else [place]
    except OSError as error:
        raise StateError(
            f"cannot be read: {error.strerror}", subject=str(place), remedy="name a file or folder of keys"
        ) from None
    keys = dict.fromkeys(key for file in files for key in _public_keys(file))
    if not keys:
        raise StateError("holds no public key", subject=str(place), remedy="`raystow keygen FILE` writes one to FILE.pub")
    return Trust(tuple(keys))


def writer_trust() -> Trust | None:
    """The public keys by which a process judges versions that it writes again: as ``trust``, else that of its signing key."""
    own, signing = trust(), signer()
    return Trust((signing.public,)) if own is None and signing is not None else own


def write_pair(path: Path) -> PublicKey:
    """Make a key: the private half in ``path``, which its owner alone can read, the public one in ``path`` + ``.pub``.

    ``StateError`` if one of them is there.
    """
    with extras.named():
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    private = Ed25519PrivateKey.generate()  # from the operating system's randomness
    public = private.public_key()
    _create(path, private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    try:
        _create(public_path(path), public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), 0o644)
    except BaseException:
        path.unlink()
        raise
    return PublicKey(public.public_bytes_raw())


def public_path(path: Path) -> Path:
    """The file of the public half of the key in ``path``."""
    return path.with_name(path.name + ".pub")


def _named(variable: str) -> Path | None:
    name = os.environ.get(variable)
    if name == "":
        raise StateError("is set, but empty", subject=variable, remedy="unset it, or set it to a file")
    return local_path(variable, name) if name is not None else None


def _public_keys(path: Path) -> list[PublicKey]:
    with extras.named():
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

    keys = []
    for label, block in _blocks(_read(path)):
        try:
            public = load_pem_public_key(block)
        except (ValueError, UnsupportedAlgorithm):
            public = None
        if not isinstance(public, Ed25519PublicKey):
            what = f"holds something else than Ed25519 public keys: {label.decode('ascii', 'replace').lower():.40}"
            raise StateError(what, subject=str(path), remedy="trust *.pub files, as `raystow keygen` writes them")
        keys.append(PublicKey(public.public_bytes_raw()))
    return keys


def _blocks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the label of each PEM block, and the block. Each byte is looked at a few times: the file may be large."""
    for part in data.split(_BEGIN)[1:]:
        label, _, content = part.partition(_DASHES)
        end = b"-----END " + label + _DASHES
        if end in content:
            yield label, _BEGIN + label + _DASHES + content[: content.index(end)] + end


def _read(path: Path, *, private: bool = False) -> bytes:
    """The file's bytes. Raises ``StateError``, without reading them, for a pipe or device, and for a ``private`` key that others
    can use or have written."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # to open a pipe waits otherwise
            status = os.fstat(file.fileno())  # of the open file, which cannot be exchanged
            if not stat.S_ISREG(status.st_mode):
                raise StateError("is no regular file", subject=str(path), remedy="name a file or folder of keys")
            if private and status.st_uid != os.geteuid():
                what = f"belongs to another user ({status.st_uid}), who can replace this private key"
                raise StateError(what, subject=str(path), remedy=f"chown {os.geteuid()} {path}")
            if private and (mode := stat.S_IMODE(status.st_mode)) & 0o077:
                what = f"others than its owner can use this private key: its mode is {mode:04o}"
                raise StateError(what, subject=str(path), remedy=f"chmod 600 {path}")
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise StateError(f"the key cannot be read: {error.strerror}", subject=str(path)) from None
    if len(data) > _LARGEST:
        raise StateError("is too large to hold keys", subject=str(path))
    return data


def _create(path: Path, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        what = "is there already, and a key is never overwritten"
        raise StateError(what, subject=str(path), remedy="name another file") from None
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
    except BaseException:
        path.unlink()  # part of a key would be in the way of a whole one
        raise
