from __future__ import annotations

from raystow.orchestrator.client.options import default_staging

GIB = 1 << 30


def test_staging_memory_fits_a_save_and_half_the_host() -> None:
    """Each rank gets an equal share of half of the host memory."""
    assert default_staging(0, ranks=1, machine=16 * GIB) == GIB
    assert default_staging(7 * GIB, ranks=8, machine=2048 * GIB) == 8 * GIB + (256 << 20)
    assert default_staging(100 * GIB, ranks=8, machine=1024 * GIB) == 64 * GIB
    assert default_staging(1000, ranks=8, machine=8 * GIB) == GIB
