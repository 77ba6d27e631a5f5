"""``Run``: checkpoints, journal and restart of an ordinary training loop."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...orchestrator.client.checkpointer import Checkpointer
from ...orchestrator.client.options import Interval
from ...state.per_rank import PerRank
from ...storage.arguments import integer
from ...storage.errors import StateError
from ...storage.versions.version import Version
from .launch import say, start
from .members import Members, check
from .pending_gradients import PendingGradients
from .recorded_steps import RecordedSteps


class Run:
    """Run a training loop that continues where it was after a failure of any process or node.

    Name what belongs to the training once, and iterate over ``steps``: it restores the newest version, replays the steps
    recorded after it, and saves. Every rank does the same. See ``docs/run.md``.

    Args:
        uri: The repository, as for ``Checkpointer``. None in a worker of Ray Train: a folder of the run's storage.
        every: Save after each so many steps. None: when it loses the least time, see ``Checkpointer.due``.
        journal: Whether to record each step, so that a failure loses one step at most: see ``docs/journal.md``.
        durable_every: Also store the recorded steps, each time there are so many. 0 for never.
        options: Options of ``Checkpointer``, such as ``retention``. In a worker of Ray Train, those of
            ``raystow.ray_train.Checkpointer``.

    Raises:
        StateError: An argument is invalid.
        ClusterError: This is one of several ranks, and no Ray cluster is running.

    Example:
        >>> run = raystow.Run("s3://bucket/runs/llama", every=500)
        >>> run.shared(model=model, optimizer=optimizer, scheduler=scheduler)
        >>> run.per_rank(loader=loader, rng=raystow.Rng())
        >>> for step in run.steps(10_000):
        ...     loss = train_step()
        ...     run.report(loss=loss)
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        *,
        every: int | None = None,
        journal: bool = False,
        durable_every: int = 0,
        **options: Any,
    ) -> None:
        if durable_every and not journal:
            raise StateError("durable_every without a journal", remedy="pass journal=True")
        interval = Interval() if every is None else Interval(steps=integer("every", every, least=1))
        self._checkpointer = start(uri, {"interval": interval, **options})
        self._journaled, self._durable_every = journal, durable_every
        self._shared, self._per_rank = dict[str, object](), dict[str, object]()
        self._after_step: Callable[[], None] | None = None
        self._metrics = dict[str, object]()
        self._cuts = dict[str, Callable[[], Mapping[str, object]]]()
        self._begun = False

    @property
    def checkpointer(self) -> Checkpointer:
        """The ``Checkpointer`` of this run."""
        return self._checkpointer

    def shared(self, **objects: object) -> None:
        """Name what all ranks have alike, or in parts: models, optimizers, schedulers, and dicts of tensors and plain values.

        Args:
            objects: Objects with ``state_dict`` and ``load_state_dict``, tensors, arrays, and dicts and lists of these, by
                name. A value that cannot change in place, such as a number, must be in a dict.

        Raises:
            StateError: A name is used already, ``steps`` has begun, or an object cannot change in place.
        """
        self._add(self._shared, objects)

    def per_rank(self, **objects: object) -> None:
        """Name what each rank has for itself: data loaders, random generators (``raystow.Rng()``), buffers.

        Args:
            objects: See ``shared``.

        Raises:
            StateError: See ``shared``.
        """
        self._add(self._per_rank, objects)

    def part(self, *names: str, cut: Callable[[], Mapping[str, object]] = dict) -> None:
        """Name parts of the run, which actors outside the ranks save as ``raystow.Part``. See ``docs/parts.md``.

        Args:
            names: The names of the parts, the same on all ranks.
            cut: Returns plain values by name, which rank 0 passes to the parts with each save.

        Raises:
            StateError: ``steps`` has begun, or a name is invalid or used twice.
        """
        if self._begun:
            raise StateError("steps() has begun", subject=", ".join(names), remedy="name everything before steps()")
        self._checkpointer._declare([*self._cuts, *names])
        self._cuts.update(dict.fromkeys(names, cut))

    def after_step(self, function: Callable[[], None]) -> Callable[[], None]:
        """Call a function after each step, also after each one that is replayed: a moving average of weights, for example.

        Args:
            function: What changes shared state besides the optimizers.

        Returns:
            The function, so that this can be a decorator.

        Raises:
            StateError: There is such a function already, or ``steps`` has begun.
        """
        if self._after_step is not None or self._begun:
            what = "steps() has begun" if self._begun else "there is a function already"
            raise StateError(what, subject="after_step", remedy="give one function, before steps()")
        self._after_step = function
        return function

    def report(self, **metrics: object) -> None:
        """Give metrics to the next version. A later value of a name replaces an earlier one.

        Args:
            metrics: Plain values by name. A version has those of rank 0.
        """
        self._metrics.update(metrics)

    def steps(self, total: int) -> Iterator[int]:
        """Restore, replay, and yield the number of each step that is left, from 1 or the one after the newest.

        After each step: calls ``after_step``, records the step if there is a journal, and saves if that is due. After the last
        one saves, and waits until all is durable. If the body raises or breaks, the step in progress is neither recorded nor
        saved, and no other rank is waited for.

        Args:
            total: The number of the last step.

        Returns:
            An iterator over the steps.

        Raises:
            StateError: Names, shapes or dtypes differ from those of the version, or something cannot be stored.
            SaveFailed: See ``Checkpointer.save`` and ``Checkpointer.close``.
            Fenced: Another run has taken over the repository.
            ClusterError: See ``Checkpointer``.
        """
        total = integer("total", total, least=0)
        if self._begun:
            raise StateError("steps() has begun already", remedy="call it once, for all epochs, or make another Run")
        self._begun = True
        with contextlib.ExitStack() as resources:
            resources.enter_context(self._checkpointer)
            members = Members(self._shared, self._per_rank)
            for optimizer in members.optimizers:
                self._checkpointer.guard(optimizer)
            state = {**self._shared, **{name: PerRank(value) for name, value in self._per_rank.items()}}
            version = self._checkpointer.restore_latest(into=state)
            recorded = self._recorded(members)
            step = 0 if version is None else version.step
            if recorded is not None:
                step = recorded.replay(step)
            self._say(version, step)
            gradients = resources.enter_context(contextlib.closing(PendingGradients(members.optimizers)))
            while step < total:
                step += 1
                gradients.begin()
                yield step
                if self._after_step is not None:
                    self._after_step()
                if recorded is not None:
                    recorded.record(step)
                due = self._checkpointer.due(step) or step == total
                if (due or recorded is not None) and self._checkpointer.rank == 0:
                    gradients.end(step)
                if due:
                    cut = {name: value for values in dict.fromkeys(self._cuts.values()) for name, value in values().items()}
                    self._checkpointer.save(state, step=step, metrics=self._metrics, cut=cut)
                    self._metrics = {}

    def _add(self, group: dict[str, object], objects: dict[str, object]) -> None:
        if self._begun:
            raise StateError("steps() has begun", subject=", ".join(objects), remedy="name everything before steps()")
        for name, value in objects.items():
            check(name, value)
            if name in self._shared or name in self._per_rank:
                raise StateError("there is an object of this name already", subject=name, remedy="give it another name")
        group.update(objects)

    def _say(self, version: Version | None, step: int) -> None:
        """Print where the training begins."""
        if self._checkpointer.rank != 0:
            return
        uri = self._checkpointer.uri
        if version is None and step == 0:
            say(f"fresh start: no version at {uri}")
            return
        since = 0 if version is None else version.step
        source = f"from version {version.id} of {uri}" if version is not None else f"no version at {uri}"
        replayed = f", replayed {step - since} steps" if step > since else ""
        say(f"resumed at step {step}, {source}{replayed}")

    def _recorded(self, members: Members) -> RecordedSteps | None:
        if not self._journaled:
            return None
        return RecordedSteps(self._checkpointer, members, self._after_step, durable_every=self._durable_every)
