"""Measure rounding rules on an optimizer's state: bytes per number, and signal-to-noise ratio in decibels.

The state is that of a small GPT trained with AdamW on this machine: fp32 weights in place of a master copy, and both moments.
Every tensor is rounded as in a save and encoded by the CPU coder. The noise is measured over all numbers of a group, and for the
worst tensor.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from raystow.orchestrator.demo.model import GPT, batch, corpus, loss_of
from raystow.orchestrator.lossy import rounded_chunk
from raystow.orchestrator.lossy.profiles import LEAST, suitable
from raystow.orchestrator.lossy.rules import Blockwise, MantissaBits, RuleSelector
from raystow.orchestrator.lossy.sqnr import Sqnr
from raystow.orchestrator.lossy.tensor_values import Numbers
from raystow.storage.coding.chunk import ChunkEncoder
from raystow.storage.coding.dtypes import dtype
from raystow.storage.coding.rounded import together

RULES: dict[str, list[RuleSelector]] = {
    "exp_avg": [MantissaBits(5), MantissaBits(6), Blockwise(8, 256), Sqnr(36), Sqnr(40)],
    "exp_avg_sq": [MantissaBits(5), MantissaBits(6), Sqnr(36), Sqnr(40)],
    "master": [MantissaBits(9), Blockwise(8, 256), Sqnr(61)],
}


def trained(steps: int) -> dict[str, list[Tensor]]:
    """Return the fp32 tensors of each group with at least ``LEAST`` bytes."""
    torch.manual_seed(0)
    model, data = GPT(width=128, layers=2), corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(1, steps + 1):
        loss = loss_of(model, batch(data, step=step, rank=0, size=8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    large = [parameter for parameter in model.parameters() if parameter.numel() * 4 >= LEAST]
    moments = {name: [optimizer.state[parameter][name] for parameter in large] for name in ("exp_avg", "exp_avg_sq")}
    return {**moments, "master": [parameter.detach() for parameter in large]}


def measured(rule_of_group: RuleSelector, group: str, tensors: list[Tensor]) -> dict[str, Any]:
    """Apply a rule to a group."""
    asked = suitable(rule_of_group, group)
    found, chosen, stored = [], Counter[str](), 0
    for tensor in tensors:
        words = tensor.reshape(-1, tensor.shape[-1]).view(torch.int32)
        rule = asked.choose(partial(Numbers, "t", "float32", words, [((0, 0), tuple(words.shape))]))
        made = words
        if rule is not None:
            made, findings = rounded_chunk.rounded(rule, words, "float32")
            found.append(rounded_chunk.check("t", rule, [findings]))
        chosen[str(rule)] += 1
        raw = made.numpy().view(np.uint8).reshape(-1)
        stored += ChunkEncoder(raw.size).encode(raw, dtype("float32"))[0].size
    return {
        "group": group,
        "rule": str(rule_of_group),
        "bytes": stored / sum(tensor.numel() for tensor in tensors),
        "sqnr": together(found).sqnr,
        "least": min(one.sqnr or math.inf for one in found),
        "chosen": dict(chosen.most_common()),
    }


def rows(state: dict[str, list[Tensor]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each rule and group."""
    for group, tensors in state.items():
        for asked in RULES[group]:
            yield measured(asked, group, tensors)


def main(
    steps: Annotated[int, typer.Option(help="training steps")] = 300,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results")] = None,
) -> None:
    """Train, round by each rule, and print the results."""
    table = Table("", "rule", "bytes", "SQNR", "least", "chosen")
    found = list(rows(trained(steps)))
    for row in found:
        chosen = ", ".join(f"{count} {rule}" for rule, count in row["chosen"].items())
        table.add_row(row["group"], row["rule"], f"{row['bytes']:.3f}", f"{row['sqnr']:.1f}", f"{row['least']:.1f}", chosen)
    Console(width=140).print(table)
    if out is not None:
        out.write_text(json.dumps({"steps": steps, "torch": torch.__version__, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
