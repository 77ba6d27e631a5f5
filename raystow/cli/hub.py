"""Uploads a folder to the Hugging Face Hub, by its own client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..storage.errors import StoreError, Unsupported

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_WEIGHTS = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"]
"""Files that a folder replaces even if it has none of the same name: from_pretrained could load them instead of its own."""


def create_repository(name: str) -> None:
    """Create a private model repository ``ORG/NAME`` on the Hub if it does not exist.

    Raises:
        Unsupported: huggingface_hub is not installed.
        StoreError: The Hub refuses, for example because no token is set.
    """
    with _client(name, "log in with `hf auth login`, or set HF_TOKEN") as client:
        client.create_repo(name, private=True, exist_ok=True)


def upload(name: str, folder: Path, message: str) -> str:
    """Add the files of a folder as one commit, which also deletes older weights, and return its URL."""
    with _client(name, f"the folder is complete: `hf upload {name} {folder}` uploads it") as client:
        commit = client.upload_folder(repo_id=name, folder_path=folder, commit_message=message, delete_patterns=_WEIGHTS)
    return str(commit.commit_url)


@contextlib.contextmanager
def _client(name: str, remedy: str) -> Iterator[HfApi]:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        install = "pip install huggingface_hub"
        raise Unsupported("huggingface_hub is not installed", subject=f"--push {name}", remedy=install) from error
    try:
        yield HfApi(library_name="raystow")
    except Exception as error:  # the client's errors have no common class
        raise StoreError(" ".join(str(error).split()) or type(error).__name__, subject=name, remedy=remedy) from error
