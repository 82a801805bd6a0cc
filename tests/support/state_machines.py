"""Runs a state machine of Hypothesis whose steps take long."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test


def run_machine(machine, examples):
    """Run `examples` sequences of 20 calls, without a deadline."""
    checks = list(HealthCheck)
    how = settings(max_examples=examples, stateful_step_count=20, deadline=None, suppress_health_check=checks)
    run_state_machine_as_test(machine, settings=how)
