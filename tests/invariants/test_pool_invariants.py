"""I5, I6, I7 and the admission bound over random schedules and every combination of rules.

I5 every reservation ends in exactly one retirement; I6 no unmarked token beyond max_staleness has weight, and none is even
served under drop_group and wait; I7 the ledger closes after every single event. And: no batch is repeated, and once everything
in flight has come back a batch can always be served.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from fakes.pool_machine import PoolMachine


@pytest.mark.parametrize("no_signal", ["filter", "refill", "train"])
@pytest.mark.parametrize("on_expiry", ["skip_tokens", "drop_group", "wait"])
@pytest.mark.parametrize("selection", ["oldest_first", "ready_first"])
def test_pool_keeps_i5_i6_i7_and_its_bound_under_any_schedule(selection: str, on_expiry: str, no_signal: str) -> None:
    machine = type("Machine", (PoolMachine,), {"pool_rules": (selection, on_expiry, no_signal)})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=25, stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)),
    )
