"""Batches of real text: the sources of Python's standard library."""

import sysconfig
from pathlib import Path

import torch

SOURCES = ("argparse.py", "ast.py", "inspect.py", "typing.py")


class TextLoader:
    """An endless loader of random pieces of the text.

    Args:
        seed: Of the pieces: each rank has its own.
        batch: Pieces in a batch.
        length: Characters of a piece.
    """

    def __init__(self, seed: int, batch: int = 8, length: int = 16) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        self.text = torch.frombuffer(
            bytearray(b"".join((folder / name).read_bytes() for name in SOURCES)), dtype=torch.uint8
        ).long()
        self.generator = torch.Generator().manual_seed(seed)
        self.batch, self.length, self.taken = batch, length, 0

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return characters, and the one that follows each piece."""
        starts = torch.randint(len(self.text) - self.length, (self.batch,), generator=self.generator)
        self.taken += 1
        pieces = self.text[starts[:, None] + torch.arange(self.length + 1)]
        return pieces[:, :-1], pieces[:, -1]

    def state_dict(self) -> dict[str, object]:
        """Return where the loader is."""
        return {"taken": self.taken, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go to where ``state_dict`` was called."""
        self.taken = state["taken"]
        self.generator.set_state(state["generator"])
