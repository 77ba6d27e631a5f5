"""The error with which a training process learns that its node worker cannot encode on a GPU. Needs no torch."""

from __future__ import annotations


class EncodingRefused(Exception):
    """The node worker cannot encode on a device; nothing has been lent to it yet, so the training process can encode instead."""
