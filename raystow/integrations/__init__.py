"""Integrations with training frameworks, one module or package each."""
