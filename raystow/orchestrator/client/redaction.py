"""Removes what looks like a key, a token or a password from texts that a version records. A repository has more readers than the
environment of its training, and versions are kept for years: a wrong guess leaves a word out, a missed one publishes it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

HIDDEN = "***"

_NAMES = frozenset(
    (
        *("key", "apikey", "keyid", "token", "tokens", "secret", "secrets", "password", "passwords", "passwd", "pwd", "pass"),
        *("passphrase", "credential", "credentials", "auth", "authorization", "sas", "sig", "signature", "cookie", "bearer"),
        *("jwt", "dsn", "webhook"),
    )
)
_PASSWORDS = frozenset(("password", "passwords", "passwd", "pwd", "passphrase", "secret", "secrets"))
"""Names of values that are secret even if they are numbers."""
_USERS = frozenset(("u", "user", "login"))
"""Names of values that may have a password after a colon."""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_NUMBERS = re.compile(r"[-+\d.,e:]*[KMBT]?", re.IGNORECASE)
_WORDS = re.compile(r"|true|false|none|null|auto", re.IGNORECASE)
_ASSIGNED = re.compile(
    r"""([\w.-]+)(["']?\s*[=:]\s*)("[^"]*|'[^']*|(?:(?:bearer|basic|token)\s+)?[^\s"',;&})\]]+)""", re.IGNORECASE
)
"""A name and its value within a text: of an environment, JSON, a header or a connection string."""
_SECRETS = re.compile(
    r"(?:AKIA|ASIA|AROA)[0-9A-Z]{12,}|AIza[\w-]{20,}|(?:hf|ghp|gho|ghu|ghs|ghr|pypi|npm|glpat|dop|shpat|xox[abeoprs]|sk|pk|rk|sess)"
    r"[_-][\w-]{10,}|github_pat_\w{10,}|eyJ[\w-]{6,}\.[\w.-]+|-----BEGIN [^-]*-----(?s:.*)|"
    r"SG\.[\w-]{10,}\.[\w-]{10,}|ya29\.[\w-]{10,}|hooks\.slack\.com/\S+|discord(?:app)?\.com/api/webhooks/\S+"
)
_RANDOM = re.compile(
    r"(?<![\w/.+-])(?=[\w+/=-]*\d)"
    r"(?:[0-9a-fA-F]{32,}|(?=[\w+/=-]*[a-z])(?=[\w+/=-]*[A-Z])[\w+/=-]{32,})(?![\w/.])"
)
_USER = re.compile(r"(://)[^/@\s]+@")
_QUERY = re.compile(r"(://[^\s?]*\?)\S+")


def redacted_arguments(arguments: Sequence[str]) -> str:
    """Return a command line with ``HIDDEN`` in place of values that look secret, or whose option's name does."""
    return shlex.join(_arguments(arguments)).replace(f"'{HIDDEN}'", HIDDEN)


def redacted_command(text: str) -> str:
    """Return ``redacted_arguments`` of a command line as a shell splits it; one with a single quote is split at spaces."""
    try:
        return redacted_arguments(shlex.split(text))
    except ValueError:
        return redacted_arguments(text.split())


def redacted(name: str, value: object) -> object:
    """Return a plain value of this name, with ``HIDDEN`` in place of what looks secret in it."""
    if isinstance(value, bytes) and _is_secret(name):
        return HIDDEN.encode()
    if isinstance(value, str):
        return _value(name, value)
    return value if _value(name, str(value)) != HIDDEN else HIDDEN


def redacted_text(text: str) -> str:
    """Return a text with ``HIDDEN`` in place of what looks secret in it."""
    text = _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(rf"\1{HIDDEN}@", text))
    return _ASSIGNED.sub(_assigned, _RANDOM.sub(HIDDEN, _SECRETS.sub(HIDDEN, text)))


def _arguments(arguments: Sequence[str]) -> Iterator[str]:
    name = ""
    for argument in arguments:
        if name and not argument.startswith("-"):
            yield _value(name, argument)
            name = ""
            continue
        option, equals, value = argument.partition("=")
        yield f"{option}={_value(option, value)}" if equals and "://" not in option else redacted_text(argument)
        name = option if not equals and option.startswith("-") else ""


def _value(name: str, value: str) -> str:
    if _is_secret(name) and not _is_harmless(name, value):
        return HIDDEN
    user, colon, _ = value.partition(":")
    return f"{user}:{HIDDEN}" if colon and _has(name, _USERS) else redacted_text(value)


def _assigned(found: re.Match[str]) -> str:
    name, between, value = found.groups()
    quote = value[0] if value[0] in "\"'" else ""
    hidden = _is_secret(name) and not _is_harmless(name, value.removeprefix(quote))
    return f"{name}{between}{quote}{HIDDEN}" if hidden else found[0]


def _is_harmless(name: str, value: str) -> bool:
    return bool(_WORDS.fullmatch(value) or (_NUMBERS.fullmatch(value) and not _has(name, _PASSWORDS)))


def _is_secret(name: str) -> bool:
    return _has(name, _NAMES)


def _has(name: str, words: frozenset[str]) -> bool:
    return not words.isdisjoint(word.lower() for word in _WORD.findall(name))
