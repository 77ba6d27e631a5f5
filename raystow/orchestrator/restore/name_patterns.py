"""Which names a restore may leave out: patterns of the arguments ``allow_missing`` and ``allow_unused``, and their proposal."""

from __future__ import annotations

import glob
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from itertools import accumulate, takewhile

from ...storage.arguments import refused
from ...storage.format.parts import part_key

_PROPOSED = 5  # patterns in an error; if more are needed, one for all of them


@dataclass(frozen=True)
class NamePatterns:
    """Shell patterns: ``*``, ``?`` and ``[...]`` as ``fnmatch`` takes them, with upper and lower case. A pattern that matches a
    container's name matches all names in it."""

    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        both = "|".join(translate(pattern) for text in self.texts for pattern in (text, f"{text}.*"))
        object.__setattr__(self, "_matches", re.compile(both).match if both else lambda name: None)

    def __contains__(self, name: str) -> bool:
        return self._matches(name) is not None  # type: ignore[attr-defined]

    @property
    def everything(self) -> bool:
        """Whether every name matches."""
        return "*" in self.texts

    def below(self, key: str) -> NamePatterns:
        """The same patterns for names below a key."""
        return NamePatterns(tuple(text if text == "*" else f"{glob.escape(key)}.{text}" for text in self.texts))

    @staticmethod
    def of(argument: str, value: object) -> NamePatterns:
        """The patterns of a user's ``argument``; ``StateError`` if they are no texts."""
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, Sequence) or isinstance(texts, bytes) or not all(isinstance(text, str) for text in texts):
            raise refused(argument, value, "a pattern of names, or a sequence of them")
        return NamePatterns(tuple(texts))


@dataclass(frozen=True)
class NameRules:
    """The names that a restore may leave out. ``missing``: of ``into``; ``unused``: of the version. All others are errors."""

    missing: NamePatterns = NamePatterns()
    unused: NamePatterns = NamePatterns()

    @staticmethod
    def of(strict: bool, allow_missing: object, allow_unused: object, *, part: str = "") -> NameRules:
        """The rules of a user's arguments. Not ``strict``: every name may be left out. ``part``: that has the names."""
        rules = NamePatterns.of("allow_missing", allow_missing), NamePatterns.of("allow_unused", allow_unused)
        if part:
            rules = rules[0].below(part_key(part)), rules[1].below(part_key(part))
        return NameRules(*rules) if strict else ANY_NAMES


STRICT = NameRules()
"""No name may be left out."""
ANY_NAMES = NameRules(NamePatterns(("*",)), NamePatterns(("*",)))
"""Every name may be left out."""


def proposal(argument: str, names: Iterable[str], others: Iterable[str], *, given: Iterable[str] = ()) -> str:
    """The argument that allows ``names`` and none of ``others``, if a few patterns do: ``allow_unused='optim'``. ``given``:
    patterns that the caller has passed."""
    taken = {around for name in others for around in _prefixes(name)}
    inside = defaultdict[str, list[str]](list)
    for name in names:
        inside[next((around for around in _prefixes(name) if around not in taken), name)].append(name)
    found = sorted(within[0] if len(within) == 1 else around for around, within in inside.items())
    if len(found) > _PROPOSED:  # sorted, so what the first and the last have in common all have
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(found[0].split("."), found[-1].split("."), strict=False))
        found = [".".join(own for own, _ in shared)]
    texts = [*given, *(glob.escape(name) or "*" for name in found)]
    return f"{argument}={(texts[0] if len(texts) == 1 else texts)!r}"


def _prefixes(name: str) -> Iterable[str]:
    return accumulate(name.split("."), lambda around, own: f"{around}.{own}")
