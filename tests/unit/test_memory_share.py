from __future__ import annotations

from raystow.orchestrator.memory import share_of_memory

GIB = 1 << 30


def test_a_rank_takes_what_a_save_takes_and_no_more_than_its_part_of_half_the_machine() -> None:
    assert share_of_memory(0, gpus=0, machine=16 * GIB) == GIB
    assert share_of_memory(7 * GIB, gpus=8, machine=2048 * GIB) == 8 * GIB + (256 << 20)
    assert share_of_memory(100 * GIB, gpus=8, machine=1024 * GIB) == 64 * GIB
    assert share_of_memory(1000, gpus=8, machine=8 * GIB) == GIB
