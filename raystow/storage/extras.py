"""Says which extra of raystow installs a library that is missing, where one is imported at first use, and which version of a
library an integration was tried with, where its interface has changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import metadata

from .errors import MissingDependency, Unsupported

_EXTRAS = {
    "ray": "train",
    "torch": "train",
    "psutil": "train",
    "jinja2": "report",
    "plotly": "report",
    "cryptography": "signatures",
    "deepspeed": "deepspeed",
    "megatron": "megatron",
    "torchtitan": "torchtitan",
    "verl": "verl",
    "lightning": "lightning",
    "transformers": "huggingface",
    "mlflow": "trackers",
    "wandb": "trackers",
}
_LIBRARIES = ("safetensors",)


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Raise ``MissingDependency`` instead of ``ModuleNotFoundError`` for a library that is optional."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _EXTRAS and library not in _LIBRARIES:
            raise
        what = f"raystow[{_EXTRAS[library]}]" if library in _EXTRAS else library
        raise MissingDependency(
            "this needs a library that is not installed", subject=library, remedy=f'pip install "{what}"'
        ) from error


@contextlib.contextmanager
def tried(library: str, version: str) -> Iterator[None]:
    """Raise ``Unsupported`` if the installed library lacks something. ``version``: of its last release that has it all."""
    try:
        yield
    except (AttributeError, ImportError) as error:
        if isinstance(error, MissingDependency) or (
            isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith(f"{library}.")
        ):
            raise  # it, or what it needs, is not installed
        try:
            installed = f"{library} {metadata.version(library)}"
        except metadata.PackageNotFoundError:
            installed = library  # imported from a checkout
        what = f"{installed} has changed: {error}"
        raise Unsupported(what, remedy=f'tried with {library} {version}: pip install "{library}=={version}.*"') from error


def check_methods(owner: type, names: tuple[str, ...]) -> None:
    """Raise ``AttributeError`` if a class of a library lacks one of these methods."""
    for name in names:
        if not callable(getattr(owner, name, None)):
            raise AttributeError(f"{owner.__name__} has no method {name}")
