"""What a command says when it fails: two lines for a person or an object for a machine, and an exit code for both."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from typing import ParamSpec

import typer

from ...storage.errors import Damaged, NotARepository, NotFound, RaystowError, StateError, UnsafeStore, Untrusted
from .present import emit, printable

EXIT_CODES = {
    0: "done",
    1: "the store, the cluster or this machine failed",
    2: "asked for what cannot be",
    3: "damaged",
    4: "not there",
    5: "the store is unsafe",
    6: "not signed by a trusted key",
    7: "different (`diff --exit-code`)",
    130: "interrupted",
}
"""What each exit code means."""

_CODES: dict[type[RaystowError], int] = {StateError: 2, Damaged: 3, NotARepository: 4, NotFound: 4, UnsafeStore: 5, Untrusted: 6}
_FILE_IN_THE_WAY = "a folder of this path is a file: name another path"
_REMEDIES = {
    errno.ENOENT: "name a path in a folder that is there and can be written to",
    errno.ENOTDIR: _FILE_IN_THE_WAY,
    errno.EEXIST: _FILE_IN_THE_WAY,
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "use a path that this user has the rights to"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room, or name a path on another disk"),
}
"""By the number of an operating system's error: what to do about the path that it names."""
_DAMAGED = "`raystow verify URI --deep --all` tells which versions are whole"

_P = ParamSpec("_P")


def exit_code(error: BaseException) -> int:
    """The exit code for an error."""
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), 1)


def described(error: RaystowError) -> dict[str, str]:
    """The JSON form of an error."""
    remedy = error.remedy or (_DAMAGED if isinstance(error, Damaged) else "")
    return {"kind": type(error).__name__, "what": error.what, "subject": error.subject, "remedy": remedy}


def complain(error: dict[str, str]) -> None:
    """Write a described error to stderr: the object and what happened, then what to do."""
    subject = f"{error['subject']}: " if error["subject"] else ""
    typer.echo(printable(f"error: {subject}{error['what']}"), err=True)
    if error["remedy"]:
        typer.echo(printable(f"  try: {error['remedy']}"), err=True)


def reporting(command: Callable[_P, None]) -> Callable[_P, None]:
    """``command``, whose errors are reported instead of raised; as JSON if it was called with ``json=True``."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except RaystowError as error:
            report, code = described(error), exit_code(error)
        except BrokenPipeError:
            raise  # the reader of our output has seen enough: typer ends quietly
        except OSError as error:
            subject = str(error.filename2 or error.filename or "")
            remedy = _REMEDIES.get(error.errno or 0, "") if subject else ""
            report, code = {"kind": "OSError", "what": error.strerror or str(error), "subject": subject, "remedy": remedy}, 1
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None
        else:
            return
        if kwargs.get("json"):
            emit({"error": report})
        else:
            complain(report)
        raise typer.Exit(code)

    return run
