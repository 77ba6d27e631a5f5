"""``raystow keygen``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ..storage.format.key_files import SIGNING_KEY, TRUSTED_KEYS, public_path, write_pair
from .options import Json, local
from .output import emit, out


def keygen(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", parser=local, help="File for the private key; FILE.pub gets the public key.")
    ],
    json: Json = False,
) -> None:
    """Create an Ed25519 key pair to sign versions with.

    Only the owner may read FILE, and an existing file is never overwritten. With RAYSTOW_SIGNING_KEY, a coordinator signs the
    versions that it commits, and a new repository accepts signed versions only: back FILE up. With RAYSTOW_TRUSTED_KEYS, commands
    refuse versions that no trusted key has signed.

    Example:  raystow keygen ~/llama-signing.pem
    """
    file = file.absolute()
    public = public_path(file)
    key = write_pair(file)
    if json:
        emit({"key": key.id, "private": str(file), "public": str(public)})
        return
    out.print(f"key {key.id}")
    out.print("to sign, on the head node before `ray start`:", style="dim")
    out.print(f"  export {SIGNING_KEY}={shlex.quote(str(file))}")
    out.print("to check, on each machine that reads versions, with a copy of the public key:", style="dim")
    out.print(f"  export {TRUSTED_KEYS}={shlex.quote(str(public))}")
