"""Versions are copied into each store and out of it."""

from __future__ import annotations

import numpy as np
from helpers.builders import memory_repository, whole, write

import raystow
from raystow.storage.commit.committer import Committer


def test_a_version_is_copied_into_a_store_and_out_of_it(uri: str) -> None:
    source = memory_repository()
    version = write(Committer(source, "training"), {"w": whole(array := np.arange(5000.0))})
    assert raystow.copy(source.uri, uri) == [version]
    assert raystow.copy(uri, f"{source.uri}-again") == [version]
    assert np.array_equal(raystow.open(f"{source.uri}-again").version(1).read("w"), array)
