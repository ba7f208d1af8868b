"""What the parts of a run take: all that the simulated runtime knows of hardware and of rollouts. planner/ makes it from a profile.

Units: seconds, tokens. The functions are pure; `plan_rollout` gives the same rollout for the same request whenever it is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from headrace.types import RolloutRequest


class PlannedStep(NamedTuple):
    """One observation, the action that answers it, and the environment's answer to that."""

    observation_tokens: int
    """Computed before the action; of the first step the prompt."""
    action_tokens: int
    """At least 1."""
    wait_seconds: float
    """Until the environment has answered; of the last step until the rollout is graded."""
    key: bool = False
    """A key step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRollout:
    steps: tuple[PlannedStep, ...]
    """At least 1."""
    reward: float
    fails: bool = False
    """After its last step, with an environment error: tried again while attempts are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """Of one engine (sampler) and of the learner."""

    plan_rollout: Callable[[RolloutRequest, int], PlannedRollout]
    """(request, number of the policy version that it starts under) -> what it does."""
    step_seconds: Callable[[int], float]
    """Running sequences -> one decode step, without reading contexts."""
    work_share: float = 1.0
    """Of a step, the model's work: what the device is busy with (DESIGN section 2)."""
    seconds_per_context_token: float = 0.0
    """More for each context token that a step reads."""
    observation_seconds: Callable[[int], float] = lambda tokens: 0.0
    """Tokens of one prompt or observation -> what computing them adds to the step in which they are."""
    gap_seconds: Callable[[int], float] = lambda running: 0.0
    """Between two decode steps: nothing is computed."""
    answer_delay_steps: float = 0.0
    """Decode steps from an environment's answer until its rollout is ready for the next one, where both share an event loop."""
    kv_capacity_tokens: int | None = None
    """Context tokens of all running sequences of one engine; None: memory is no limit."""
    capacity: int = 1
    """Running batch that reaches 90 % of the best rate (DESIGN section 2)."""
    saturated_tokens_per_second: float | None = None
    learn_seconds: Callable[[float, int], float]
    """(tokens of the trajectories of one minibatch, ranks) -> one update."""
    learn_busy_fraction: float = 1.0
    """Of an update's seconds, in forward, backward and optimizer."""
    handover_seconds: float = 0.0
    """The batch to the learner and the result back."""
    publish_seconds: float = 0.0
    """Of the learner's time."""
    update_bytes: int = 0
    transfer_seconds: float = 0.0
    """From an announcement until a sampler can take the weights up."""
    pause_seconds: float = 0.0
    """One sampler takes up an update: it decodes nothing."""
    dispatch_seconds: float = 0.0
    """From a worker's getting a rollout to the rollout's start: what the conductor and the wire take for it, at both its ends."""
    verify_seconds: Callable[[int], float] = lambda tokens: 0.0
    """Tokens of a trajectory -> checking it under newer weights, in which a sampler decodes nothing."""
    rejects: Callable[[int, int], float] | None = None
    """(checked tokens, updates since they were drawn) -> chance that one of them is rejected; None: what is asked for is not known."""
    key_step_share: float = 0.0
    """Of all steps; 0: none is marked."""
    num_cores: int | None = None
    """Of the machine whose cores the devices share, as the local runtime pins them; None: every device has what it needs to itself."""
    report_seconds: float = 0.0
    """Between two reports of a worker at least: what finishes meanwhile goes in one."""
    heartbeat_seconds: float = 1.0
    """Between two signs of life of a worker that has rollouts in flight; the longer, the fewer events. New room is told 20 times as often."""
