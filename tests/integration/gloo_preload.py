"""Imported once by the process from which ranks are forked."""

import layouts  # noqa: F401

import raystow.dcp  # noqa: F401
