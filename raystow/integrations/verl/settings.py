"""Which repository a run of verl uses, and the options of its ``Checkpointer``."""

from __future__ import annotations

import os
from pathlib import Path

from ...state.tree import State
from ...storage.addresses import local_path

VARIABLE = "RAYSTOW_VERL"
"""The environment variable with the address of the repository."""

_configured = State()


def configure(uri: str | os.PathLike[str] | None = None, **options: object) -> None:
    """Set the repository and options of the ``Checkpointer`` for this process.

    Call it in a module of your own that imports ``raystow.verl``, and name that module in ``model.external_lib``: verl imports it
    in each process.

    Args:
        uri: The repository. None: the one that ``RAYSTOW_VERL`` names, else the folder ``raystow`` in
            ``trainer.default_local_dir``, which all nodes must share then.
        options: Arguments of ``raystow.Checkpointer``, such as ``compression``. ``retention`` takes the place of verl's
            ``max_ckpt_to_keep``.
    """
    _configured.clear()
    _configured.update(options, **({} if uri is None else {"uri": os.fspath(uri)}))


def repository_of(root: str) -> str:
    """The address of the repository of a run with this ``trainer.default_local_dir``."""
    return str(_configured.get("uri") or os.environ.get(VARIABLE) or os.path.join(os.path.abspath(local_dir(root)), "raystow"))


def local_dir(root: str) -> Path:
    """``trainer.default_local_dir`` as a path. Raises ``StateError`` if it is an address, of which verl would make a folder."""
    return local_path("trainer.default_local_dir", root)


def settings() -> State:
    """The arguments of ``configure`` that have the same effect in another process."""
    return {**_configured, "uri": _configured.get("uri") or os.environ.get(VARIABLE)}


def options() -> State:
    """The configured options of the ``Checkpointer``."""
    return {name: value for name, value in _configured.items() if name != "uri"}
