"""Exports by Python calls, to a folder or an object store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from ...storage.addresses import local_path
from ...storage.arguments import integer, refused
from ...storage.format import key_files
from ...storage.repository import Repository, open_repository
from ...storage.versions.version import Version
from ...storage.versions.version_selector import LATEST, VersionSelector
from ..argument_checks import address, one_of
from .destination import Destination
from .hf_folder import plan_folder
from .version_folder import plan_version_folder

_MODEL_FILE = 5 * 10**9
_FILE = 5 << 30
_DTYPES = ("float32", "bfloat16", "float16")


def export_model(
    source: str | os.PathLike[str] | Version,
    to: str | os.PathLike[str],
    version: VersionSelector = LATEST,
    *,
    prefix: str | None = None,
    dtype: str | None = None,
    files: str | os.PathLike[str] | None = None,
    max_shard_size: int = _MODEL_FILE,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> str:
    """Write the weights of a version for ``from_pretrained`` of Hugging Face's libraries, in at most 512 MiB of memory.

    All digests are checked. A folder appears when it is complete. In an object store, the index and ``config.json`` are written
    last, and the same call continues an interrupted export. See ``raystow export --help``.

    Args:
        source: A repository, see ``open``, or a ``Version``.
        to: A new or empty folder, or an address ``s3://``, ``gs://`` or ``az://`` without objects.
        version: See ``restore``.
        prefix: The prefix of the tensors to export. None: that of the only mapping of weights.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``: the dtype to convert to. None keeps each tensor's dtype.
        files: A folder whose config and tokenizer files are copied.
        max_shard_size: Bytes of a file; a larger tensor has a file of its own.
        progress: Called with the decoded bytes of each chunk, from several threads.

    Returns:
        The absolute path, or the address.

    Raises:
        StateError: ``to`` is not empty, the weights are not found, or names or dtypes are such that no library loads them.
        NotFound: There is no such version.
        Damaged: Stored bytes do not match their digests.
        StoreError: A store failed.
    """
    if dtype is not None:
        one_of("dtype", dtype, _DTYPES)
    destination, folder = Destination.parse("to", to), local_path("files", files) if files is not None else None
    limit = integer("max_shard_size", max_shard_size, least=1)
    with _leased(source, version) as chosen:
        plan = plan_folder(chosen, prefix=prefix, dtype=dtype, source=folder, limit=limit)
        plan.refuse_unloadable()
        with destination.new(plan.plan) as output:
            plan.write(output, progress)
    return destination.shown


def export_version(
    source: str | os.PathLike[str] | Version,
    to: str | os.PathLike[str],
    version: VersionSelector = LATEST,
    *,
    max_file_size: int = _FILE,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> str:
    """Write all tensors of a version as safetensors files and its plain values as JSON, in at most 512 MiB of memory.

    See ``export_model`` for interrupted calls, and ``raystow restore --help`` for the files.

    Args:
        source: A repository, see ``open``, or a ``Version``.
        to: See ``export_model``.
        version: See ``restore``.
        max_file_size: Bytes of a file; a larger tensor has a file of its own.
        progress: Called with the decoded bytes of each chunk, from several threads.

    Returns:
        The absolute path, or the address.

    Raises:
        StateError: ``to`` is not empty, or a name is reserved in safetensors files.
        NotFound: There is no such version.
        Damaged: Stored bytes do not match their digests.
        StoreError: A store failed.
    """
    destination, limit = Destination.parse("to", to), integer("max_file_size", max_file_size, least=1)
    with _leased(source, version) as chosen:
        plan = plan_version_folder(chosen, limit=limit)
        with destination.new(plan.plan) as output:
            plan.write(output, progress)
    return destination.shown


@contextlib.contextmanager
def _leased(source: str | os.PathLike[str] | Version, which: VersionSelector) -> Iterator[Version]:
    """Yield a version that no collection deletes while the block runs."""
    if isinstance(source, Version):
        if which != LATEST:
            raise refused("version", which, "left out if source is a Version, which is exported")
        repository, found = Repository(source.store, source.repository_id, trust=source.trust or key_files.trust()), source
    else:
        repository = open_repository(address(source))
        found = repository.version(which)
    with repository.lease(found):
        yield found
