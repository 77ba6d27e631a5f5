"""Says which extra of raystow installs a library that is missing, where one is imported at first use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .errors import MissingDependency

_EXTRAS = {
    "ray": "train",
    "torch": "train",
    "psutil": "train",
    "jinja2": "report",
    "matplotlib": "report",
    "cryptography": "signatures",
}
_LIBRARIES = ("lightning", "transformers", "safetensors")


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
