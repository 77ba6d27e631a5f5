"""The engine that Hugging Face's Trainer makes when training begins, for ``raystow.huggingface.Checkpointing``."""

from __future__ import annotations

from deepspeed.runtime.engine import DeepSpeedEngine
from transformers import Trainer

from ...orchestrator.client.checkpointer import Checkpointer
from ...state.tree import State
from ...storage.errors import StateError
from ...storage.versions.version import Version
from ...storage.versions.version_selector import VersionSelector
from .attach import AttachedEngine
from .partitions import Engine


class TrainerEngine:
    """Attaches the engine of a Trainer as soon as there is one, and restores ``version`` when the Trainer loads a checkpoint.

    Attributes:
        attached: The engine; None until the training begins.
    """

    def __init__(self, trainer: Trainer, checkpointer: Checkpointer, version: VersionSelector) -> None:
        self.attached: AttachedEngine | None = None
        self._checkpointer, self._version = checkpointer, version
        self._found: Version | None = None
        prepare = trainer.accelerator.prepare

        def prepare_and_attach(*parts: Engine, **options: Engine) -> Engine:
            prepared = prepare(*parts, **options)
            for part in prepared if isinstance(prepared, tuple) else (prepared,):
                if isinstance(part, DeepSpeedEngine):
                    self.attached = AttachedEngine(part, checkpointer)
                    part.load_checkpoint = self.load
            return prepared

        self._trainer = trainer
        trainer.accelerator.prepare = prepare_and_attach
        trainer._load_optimizer_and_scheduler = lambda folder: None  # it would read a pickle

    def begun(self) -> None:
        """Undo the changes of the Trainer, which only the beginning of the training needs."""
        vars(self._trainer.accelerator).pop("prepare", None)
        vars(self._trainer).pop("_load_optimizer_and_scheduler", None)

    def restore(self, parts: State) -> Version | None:
        """Restore what is no part of the engine, which does not exist yet."""
        self._found = self._checkpointer.restore(parts, self._version, allow_unused="*")
        return self._found

    def load(self, *_: object, **__: object) -> tuple[str | None, State | None]:
        """Restore the version, in place of the engine's ``load_checkpoint``."""
        assert self.attached is not None
        assert self._found is not None
        restored = self.attached.restore(self._version)
        if restored is None:
            return None, None
        if restored[0].id != self._found.id:  # a version of which only the tensors are damaged
            what = f"the Trainer has the progress of version {self._found.id}, of which the engine cannot be restored"
            raise StateError(what, subject=self._checkpointer.uri, remedy=f"call resume(trainer, {restored[0].id})")
        return self._checkpointer.uri, restored[1]
