"""Where a version comes from: what rank 0 knows of its program, and each rank of its hardware. All of it is bounded, and what
looks like a key is left out (see ``redaction``)."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ...storage.arguments import refused
from ...storage.format import values
from ...storage.runtime import background
from ...storage.runtime.clock import SYSTEM
from ...storage.versions.version import Version
from .redaction import redacted, redacted_arguments, redacted_command, redacted_text

MAX_NOTES = 16 << 10
"""Characters of the notes of a version, as they are stored."""

_LONGEST = 2048  # characters of one value
_HOST = 128
_PACKAGES = 128
_PATIENCE = 1.0  # seconds that the first save waits for git
_GIT = 20.0  # seconds that git may take


def notes_of(notes: object) -> dict[str, str]:
    """Return the user's notes by name, as ``values`` stores them. Raises ``StateError`` for others than plain values, or too many
    of them."""
    if notes is None:
        return {}
    if not isinstance(notes, Mapping) or not all(isinstance(name, str) and values.is_plain(one) for name, one in notes.items()):
        raise refused("notes", notes, "a dict of plain values by name", "None")
    found = {name: values.dumps(redacted(name, one)) for name, one in notes.items()}
    if sum(len(name) + len(text) for name, text in found.items()) > MAX_NOTES:
        raise refused("notes", f"of more than {MAX_NOTES} characters", "less: a path to a file, for example")
    return found


class Provenance:
    """What a process records of itself in its versions.

    Args:
        rank: Rank 0 records the program, the others their hardware only.
        notes: What the user adds; see ``notes_of``.
        entrypoint: Returns the command line of the driver if this process is a worker of Ray.
    """

    def __init__(self, rank: int, notes: object = None, entrypoint: Callable[[], str] = lambda: "") -> None:
        self._rank, self._entrypoint, self._notes = rank, entrypoint, notes_of(notes)
        self._found: dict[str, str] = {}
        self._ready = threading.Event()
        self._run, self._gpu = SYSTEM.token(), ""
        if rank == 0:
            background.start("raystow-provenance", self._look)

    @property
    def notes(self) -> dict[str, str]:
        """The user's notes, which rank 0 sends."""
        return self._notes if self._rank == 0 else {}

    def texts(self, resumed: Version | None) -> dict[str, str]:
        """Return what is recorded of a save. ``resumed``: the version that the process has restored."""
        self._gpu = self._gpu or _gpu()
        hardware = {"host": platform.node()[:_HOST], "gpu": self._gpu[:_HOST]}
        if self._rank > 0:
            return hardware
        self._ready.wait(_PATIENCE)
        parent = {} if resumed is None else {"resumed": str(resumed.id)}
        found = {**self._found, **_packages(), "run": self._run, **parent, **hardware}
        return {name: text[:_LONGEST] for name, text in found.items() if text}

    def _look(self) -> None:
        try:
            self._found["command"] = _command(self._entrypoint)
            self._found |= _git()
        finally:
            self._ready.set()


def _command(entrypoint: Callable[[], str]) -> str:
    """The command line of this process, or of the driver whose worker of Ray it is."""
    if Path(sys.argv[0] if sys.argv else "").name == "default_worker.py":
        return redacted_command(entrypoint())
    return redacted_arguments([Path(sys.executable).name, *sys.argv])


def _git() -> dict[str, str]:
    """The commit of the program's folder, and how many files differ from it."""
    for folder in _folders():
        commit = _asked(folder, "rev-parse", "HEAD")
        if commit:
            changed = _asked(folder, "status", "--porcelain", "--untracked-files=no").splitlines()
            return {"commit": commit.strip(), "changed files": str(len(changed))}
    return {}


def _folders() -> Iterator[Path]:
    """Where the program may be: its script's folder, the present one, and those that Python imports from, but not its own."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    found = [os.path.dirname(script)] if script else []
    for text in dict.fromkeys([*found, os.getcwd(), *sys.path[:4]]):
        folder = Path(text).resolve()
        if folder.is_dir() and "site-packages" not in folder.parts and not folder.is_relative_to(sys.base_prefix):
            yield folder


def _asked(folder: Path, *words: str) -> str:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=_GIT, env=environment, check=False
        )
    except (OSError, ValueError, subprocess.SubprocessError):  # there is no git, or it hangs
        return ""
    return done.stdout if done.returncode == 0 else ""


def _packages() -> dict[str, str]:
    """The versions of the packages that the process has imported."""
    found = {"package python": platform.python_version()}
    for name, module in sorted(sys.modules.items()):
        version = getattr(module, "__dict__", {}).get("__version__")
        if "." not in name and not name.startswith("_") and isinstance(version, str) and len(found) < _PACKAGES:
            found[f"package {name[:64]}"] = redacted_text(version)[:64]
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return found | ({"package cuda": cuda} if isinstance(cuda, str) else {})


def _gpu() -> str:
    """The name of this process's GPU, if torch uses one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    return str(torch.cuda.get_device_name())
