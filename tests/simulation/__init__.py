"""The deterministic simulation: real coordinators, collections and readers on a mock clock and a store that fails.

``docs/design/008-simulation.md`` says what is real, what is not, and what is checked.
``python -m tests.simulation SEED`` plays one seed again.
"""
