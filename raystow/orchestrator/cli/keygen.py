"""``raystow keygen``: make the key that signs versions."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from .present import emit, out
from .target import Json


def keygen(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it; the public half goes to FILE.pub.")],
    json: Json = False,
) -> None:
    """Make an Ed25519 key with which a coordinator signs the versions that it commits.

    FILE is readable by its owner alone, and never overwritten. A repository that is made under a signing key takes signed
    versions only: keep a copy of FILE in a safe place. docs/security.md tells what signatures do, and what they do not.

    Example:  raystow keygen ~/llama-signing.pem
    """
    from ...storage.format.key_files import SIGNING_KEY, TRUSTED_KEYS, public_path, write_pair

    file = file.expanduser().absolute()
    public = public_path(file)
    key = write_pair(file)
    if json:
        emit({"key": key.id, "private": str(file), "public": str(public)})
        return
    out.print(f"key {key.id}", soft_wrap=True)
    out.print("on the head node, before `ray start`, to sign:", style="dim")
    out.print(f"  export {SIGNING_KEY}={shlex.quote(str(file))}", soft_wrap=True)
    out.print("wherever versions are read, with a copy of the public half, to check:", style="dim")
    out.print(f"  export {TRUSTED_KEYS}={shlex.quote(str(public))}", soft_wrap=True)
