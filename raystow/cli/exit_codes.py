"""Exit codes, and how a failed command reports its error: two lines for a person, an object with ``--json``."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec

import typer

from ..storage import extras
from ..storage.errors import Damaged, NotARepository, NotFound, RaystowError, StateError, UnsafeStore, Untrusted
from .interrupts import say_interrupted
from .output import emit, printable

DIFFERENT = 7

EXIT_CODES = {
    0: "success",
    1: "the store, the cluster or this machine failed",
    2: "invalid request",
    3: "damaged",
    4: "not found",
    5: "the store is unsafe for commits",
    6: "not signed by a trusted key",
    DIFFERENT: "different (`diff --exit-code`)",
    130: "interrupted",
    141: "the reader of the output closed it (SIGPIPE)",
}

_CODES: dict[type[RaystowError], int] = {StateError: 2, Damaged: 3, NotARepository: 4, NotFound: 4, UnsafeStore: 5, Untrusted: 6}
_FILE_ON_PATH = "a folder on this path is a file: use another path"
_REMEDIES = {
    errno.ENOENT: "use a path in an existing, writable folder",
    errno.ENOTDIR: _FILE_ON_PATH,
    errno.EEXIST: _FILE_ON_PATH,
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "use a path that this user may write"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or use a path on another disk"),
}
_DAMAGED = "`raystow verify URI --deep --all` finds the versions that are whole"

_P = ParamSpec("_P")


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error."""
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), 1)


def error_fields(error: RaystowError | OSError) -> dict[str, str]:
    """Return the JSON form of an error; ``subject`` and ``remedy`` may be empty."""
    if isinstance(error, RaystowError):
        remedy = error.remedy or (_DAMAGED if isinstance(error, Damaged) else "")
        return {"kind": type(error).__name__, "what": error.what, "subject": error.subject, "remedy": remedy}
    subject = str(error.filename2 or error.filename or "")
    remedy = _REMEDIES.get(error.errno or 0, "") if subject else ""
    return {"kind": "OSError", "what": error.strerror or str(error), "subject": subject, "remedy": remedy}


def print_error(error: RaystowError | OSError) -> None:
    """Write the object and what happened to stderr, then what to do."""
    found = error_fields(error)
    subject = f"{found['subject']}: " if found["subject"] else ""
    typer.echo(printable(f"error: {subject}{found['what']}"), err=True)
    if found["remedy"]:
        typer.echo(printable(f"  try: {found['remedy']}"), err=True)


def conclude(errors: Sequence[RaystowError | OSError], facts: Mapping[str, object] | None) -> None:
    """Print ``facts`` as JSON with the first error or, without facts, all errors; exit with the code of the first error."""
    if facts is not None:
        emit({**facts, **({"error": error_fields(errors[0])} if errors else {})})
    else:
        for error in errors:
            print_error(error)
    if errors:
        raise typer.Exit(exit_code(errors[0]))


def reporting(command: Callable[_P, None]) -> Callable[_P, None]:
    """Wrap a command so that it reports errors instead of raising them; as JSON if it is called with ``json=True``."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            with extras.named():
                command(*args, **kwargs)
        except BrokenPipeError:
            raise  # the reader of the output closed it: see ``main``
        except (RaystowError, OSError) as error:
            conclude([error], {} if kwargs.get("json") else None)
        except KeyboardInterrupt:
            say_interrupted()
            raise typer.Exit(130) from None

    return run
