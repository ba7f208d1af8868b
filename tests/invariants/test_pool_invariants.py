"""I5, I6, I7 and the admission bound over random schedules and every combination of rules.

I5 every reservation ends in exactly one retirement; I6 no unmarked token beyond max_staleness has weight, and none is even
served under drop_group and wait; I7 the ledger closes after every single event. And: no batch is repeated, and once everything
in flight has come back a batch can always be served.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

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


class GovernedMachine(PoolMachine):
    """The bound in effect moves at any moment; what it has lowered admission to may be over-full for a while, the setting never is."""

    @rule(share=st.sampled_from([0.0, 0.5, 1.0]))
    def govern(self, share: float) -> None:
        self.bound(share)

    @rule(most=st.integers(1, 12))
    def reserve_under_the_bound(self, most: int) -> None:
        batches = (self.pool.max_staleness + 1) // self.settings.updates_per_batch
        for _ in range(most):
            if self._reserve_one("short", "a") is None:
                break
            assert self.pool.outstanding_groups <= batches * self.settings.pool.groups_per_batch, "a group was let out over the bound in effect"


@pytest.mark.parametrize("on_expiry", ["skip_tokens", "drop_group", "wait"])
@pytest.mark.parametrize("selection", ["oldest_first", "ready_first"])
def test_the_bound_in_effect_is_obeyed_however_it_moves_and_nothing_blocks(selection: str, on_expiry: str) -> None:
    machine = type("Machine", (GovernedMachine,), {"pool_rules": (selection, on_expiry, "train")})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=25, stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)),
    )
