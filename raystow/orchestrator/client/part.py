"""``Part``: saves and restores the state of an actor outside the ranks, as a part of the versions that the ranks save."""

from __future__ import annotations

import contextlib
import functools
import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...state.tree import State
from ...storage.arguments import integer, refused
from ...storage.errors import RaystowError
from ...storage.format import values
from ...storage.format.parts import is_name, part_key, part_number
from ...storage.versions.version import Version
from ...storage.versions.version_selector import LATEST, VersionSelector
from ...workers.protocol.messages import AskNextSave
from ..argument_checks import LONGEST, positive
from .checkpointer import Checkpointer
from .failures import Failures
from .options import Compression, Memory, Replication
from .pending import Pending


@dataclass(frozen=True)
class BegunSave:
    """A save that the ranks have begun.

    Attributes:
        step: The training step.
        cut: What rank 0 has passed to ``save``.
    """

    step: int
    cut: Mapping[str, object] = field(default_factory=dict)


class Part:
    """Save and restore one part of a run's versions, in an actor or process outside the ranks, on any node of the cluster.

    ``Checkpointer(uri, parts=(...))`` of the ranks declares the parts. A version of theirs is committed when all ranks and all
    declared parts have delivered that step, or not at all. See ``docs/parts.md``.

    Args:
        uri: The repository, as that of the ``Checkpointer``.
        name: 1 to 64 letters, digits, ``_`` and ``-``. One process has it; the process that takes it last fences the others.
        timeout: As of ``Checkpointer``.
        max_in_flight: As of ``Checkpointer``.
        on_failure: As of ``Checkpointer``.
        memory: As of ``Checkpointer``.
        compression: As of ``Checkpointer``.
        replication: As of ``Checkpointer``.

    Attributes:
        name: The part.
        failures: Its failed saves.

    Raises:
        StateError: An argument is invalid; nothing has been started then.
        ClusterError: No Ray cluster is running.

    Example:
        >>> part = raystow.Part("s3://bucket/run", "buffer")
        >>> part.restore(into=state)
        >>> begun = part.wait_for(0)
        >>> part.save(state, step=begun.step)
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        name: str,
        *,
        timeout: float = 600.0,
        max_in_flight: int = 2,
        on_failure: str | int = 10,
        memory: int | Memory = Memory(),  # noqa: B008 (frozen)
        compression: str | Compression = Compression(),  # noqa: B008
        replication: int | Replication = Replication(),  # noqa: B008
    ) -> None:
        if not isinstance(name, str) or not is_name(name):
            raise refused("name", name, "1 to 64 letters, digits, _ and -")
        self.name, self._timeout = name, positive("timeout", timeout, most=LONGEST)
        options = {"memory": memory, "compression": compression, "replication": replication}
        self._member = _PartCheckpointer(
            uri, name, timeout=timeout, max_in_flight=max_in_flight, on_failure=on_failure, **options
        )

    def __repr__(self) -> str:
        return f"Part({self._member.uri!r}, {self.name!r})"

    @property
    def failures(self) -> Failures:
        return self._member.failures

    def wait_for(self, step: int = 0, *, timeout: float | None = None) -> BegunSave:
        """Wait until rank 0 has begun to save ``step`` or a later step that this part has not saved yet.

        Args:
            step: The least step. Saves of earlier steps that wait for this part fail.
            timeout: Seconds; None: that of the constructor.

        Returns:
            The step to save now, and what rank 0 has passed along.

        Raises:
            StateError: An argument is invalid, or this part is closed.
            DeadlineExceeded: The ranks have begun no such save within ``timeout``.
            Fenced: Another process has taken this part.
            ClusterError: The coordinator cannot be reached.
        """
        step = integer("step", step, least=0)
        seconds = self._timeout if timeout is None else positive("timeout", timeout, most=LONGEST)
        return self._member.next_cut(step, seconds)

    def save(self, state: State, *, step: int) -> Pending:
        """Start to save ``state`` as the part of the ranks' version of this step. See ``Checkpointer.save``.

        The part may begin before the ranks; its large tensors are read when a rank has begun, too.

        Args:
            state: As of ``Checkpointer.save``.
            step: The training step.

        Returns:
            The save in flight. Its ``result()`` waits for the version.

        Raises:
            StateError: The state holds something that cannot be stored; the message names its path. Nothing is written.
            SaveFailed: As of ``Checkpointer.save``. A save of a step that the ranks do not save fails, and names the part.
            OutcomeUnknown: The same, for a save that may or may not be a version.
            Fenced: Another process has taken this part, or another run the repository.
        """
        with self._own_names():
            return self._member.save({part_key(self.name): state}, step=step)

    def fence(self) -> None:
        """Wait until all tensors given to ``save`` have been read; see ``Checkpointer.fence``.

        Raises:
            SaveFailed: As of ``Checkpointer.fence``.
            OutcomeUnknown: The same, for a save that may or may not be a version.
            Fenced: Another process has taken this part, or another run the repository.
        """
        self._member.fence()

    def restore(
        self,
        into: State,
        version: VersionSelector = LATEST,
        *,
        strict: bool = True,
        allow_missing: str | Sequence[str] = (),
        allow_unused: str | Sequence[str] = (),
        cast: bool = False,
        allow_uncommitted: bool = True,
    ) -> Version | None:
        """Fill ``into`` from this part of the version that the ranks restore: they and all declared parts agree on one.

        The ranks wait for each declared part, and a part for the ranks.

        Args:
            into: See ``raystow.restore``.
            version: As the ranks pass it.
            strict: See ``raystow.restore``.
            allow_missing: See ``raystow.restore``. Names are those in ``into``.
            allow_unused: See ``raystow.restore``.
            cast: See ``Checkpointer.restore``.
            allow_uncommitted: See ``Checkpointer.restore``.

        Returns:
            The version, or None if the latest one is asked for and there is none.

        Raises:
            StateError: See ``Checkpointer.restore``; or the ranks do not declare this part.
            NotFound: There is no such version.
            Damaged: See ``Checkpointer.restore``.
            Fenced: Another process has taken this part.
            DeadlineExceeded: A rank or part did not call, or did not read on, for ``timeout`` seconds.
        """
        restore = functools.partial(self._member.restore, strict=strict, cast=cast, allow_uncommitted=allow_uncommitted)
        with self._own_names():
            return restore({part_key(self.name): into}, version, allow_missing=allow_missing, allow_unused=allow_unused)

    def wait(self) -> None:
        """Wait until all saves in flight are durable or have failed; see ``Checkpointer.wait``.

        Raises:
            SaveFailed: As of ``Checkpointer.wait``.
            OutcomeUnknown: The same, for a save that may or may not be a version.
            Fenced: Another process has taken this part, or another run the repository.
        """
        self._member.wait()

    def close(self) -> None:
        """Wait for the saves in flight, and disconnect; see ``Checkpointer.close``.

        Raises:
            SaveFailed: As of ``Checkpointer.close``; everything is released then, too.
            OutcomeUnknown: The same, for a save that may or may not be a version.
            Fenced: Another process has taken this part, or another run the repository.
        """
        self._member.close()

    def __enter__(self) -> Part:
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        self._member.__exit__(error, *rest)

    @contextlib.contextmanager
    def _own_names(self) -> Iterator[None]:
        """Give errors the names that the caller knows: without the key of the part."""
        try:
            yield
        except RaystowError as error:
            key = part_key(self.name)
            texts = [error.what, error.subject, error.remedy]
            for known in f'["{key}"]', f"{key}.", f"{glob.escape(key)}.":
                texts = [text.replace(known, "") for text in texts]
            what, subject, remedy = texts
            if (what, subject, remedy) == (error.what, error.subject, error.remedy):
                raise
            raise type(error)(what, subject=subject, remedy=remedy) from error


class _PartCheckpointer(Checkpointer):
    """The part as a member of the run: below its key, rank 0 of one rank."""

    def __init__(self, uri: str | os.PathLike[str], part: str, **options: object) -> None:
        self._part = part
        super().__init__(uri, rank=0, world_size=1, compare_replicas="off", **options)  # type: ignore[arg-type]  # as ``Part`` has them

    def next_cut(self, first: int, timeout: float) -> BegunSave:
        """Wait for a save of the ranks; see ``Part.wait_for``."""
        self._check_open()
        member = self._startup.member
        who, saving = (part_number(self._part), member.incarnation, 1), tuple(self._in_flight.steps().values())
        ask = AskNextSave(*who, first, seconds=0.0, timeout=timeout, saving=saving)
        found = self._startup.port.ask(ask)
        return BegunSave(found.step, {name: values.loads(text) for name, text in found.cut.items()})
