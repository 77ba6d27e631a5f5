"""Repositories of earlier releases, and a reader that was written from the specification."""
