"""Uploads a folder to the Hugging Face Hub, by its own client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ..storage.errors import StoreError, Unsupported

_WEIGHTS = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"]
"""Files that a folder replaces even if it has none of the same name: from_pretrained could load them instead of its own."""


class HubRepository:
    """A model repository on the Hub. It is created, private, if it does not exist.

    Args:
        name: ``ORG/NAME``.

    Raises:
        Unsupported: huggingface_hub is not installed.
        StoreError: The Hub refuses, for example because no token is set.
    """

    def __init__(self, name: str) -> None:
        try:
            from huggingface_hub import HfApi
        except ImportError as error:
            remedy = "pip install huggingface_hub"
            raise Unsupported("huggingface_hub is not installed", subject=f"--push {name}", remedy=remedy) from error
        self._name, self._api = name, HfApi(library_name="raystow")
        with self._reporting("log in with `hf auth login`, or set HF_TOKEN"):
            self._api.create_repo(name, private=True, exist_ok=True)

    def upload(self, folder: Path, message: str) -> str:
        """Add the files of a folder as one commit, which also deletes older weights, and return its URL."""
        with self._reporting(f"the folder is complete: `hf upload {self._name} {folder}` uploads it"):
            commit = self._api.upload_folder(
                repo_id=self._name, folder_path=folder, commit_message=message, delete_patterns=_WEIGHTS
            )
        return str(commit.commit_url)

    @contextlib.contextmanager
    def _reporting(self, remedy: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the client's errors have no common class
            raise StoreError(" ".join(str(error).split()) or type(error).__name__, subject=self._name, remedy=remedy) from error
