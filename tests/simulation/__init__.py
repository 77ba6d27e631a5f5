"""The deterministic simulation: real coordinators, collections and readers on a mock clock and a faulty store.

``docs/design/008-simulation.md`` describes which parts are simulated and which invariants are checked.
``python -m tests.simulation SEED`` replays one seed.
"""
