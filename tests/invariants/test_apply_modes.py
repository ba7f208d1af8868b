"""When weights are taken up, for all orders of events: a key step is never begun with older weights than there are, no rollout has two
versions under rollout_start, and no update waits for ever."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import Apply
from headrace.sampler.applying import ApplyGate
from headrace.types import RolloutKey

MAX_DELAY = 5.0


@dataclass
class Rollout:
    key: RolloutKey
    waiting: bool = False
    """Its request is there and not served yet."""
    running: bool = False
    draws_key_step: bool = False
    versions: set[int] = field(default_factory=set)


@dataclass
class World:
    """A sampler without a model: rollouts come, act, wait and go; the gate is asked between two steps."""

    gate: ApplyGate
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    now: float = 0.0
    published: int = 0
    version: int = 0
    seen_at: float | None = None
    held: bool = False

    def event(self, name: str, number: int) -> None:
        rollout = self.rollouts.get(number)
        match name:
            case "request" | "key request" if rollout is None or not (rollout.waiting or rollout.running):
                rollout = self.rollouts.setdefault(number, Rollout(RolloutKey(number, 0, 0)))
                rollout.waiting, rollout.draws_key_step = True, name == "key request"
            case "answer" if rollout is not None and rollout.running:
                rollout.running = False
            case "release" if rollout is not None:
                self.gate.released(rollout.key)
                del self.rollouts[number]
            case "publish":
                self.published += 1
            case "pass":
                self.now += number
            case "hold":
                self.held = not self.held
            case _:
                pass
        self.step()

    def step(self) -> None:
        self.take_up()
        for rollout in self.rollouts.values():
            if rollout.waiting and self.gate.admits(rollout.key):
                self.gate.begin(rollout.key)
                rollout.waiting, rollout.running = False, True
                self.first_token(rollout)
            if rollout.running:
                rollout.versions.add(self.version)

    def take_up(self) -> None:
        if self.held or self.published == self.version:
            self.gate.withdraw()
            self.seen_at = None
            return
        if self.seen_at is None:
            self.seen_at = self.now
        key_step_due = any(rollout.waiting and rollout.draws_key_step for rollout in self.rollouts.values())
        at_rest = not any(rollout.running for rollout in self.rollouts.values())
        if self.gate.allows(now=self.now, at_rest=at_rest, key_step_due=key_step_due):
            self.check_moment(at_rest, key_step_due)
            self.gate.applied(self.now)
            self.version, self.seen_at = self.published, None
        else:
            assert self.gate.apply is not Apply.EVERY_STEP
            assert self.gate.apply is not Apply.KEY_STEPS or not at_rest
            assert self.gate.apply is not Apply.ROLLOUT_START or any(rollout.versions for rollout in self.rollouts.values())

    def check_moment(self, at_rest: bool, key_step_due: bool) -> None:
        assert self.seen_at is not None
        if self.gate.apply is Apply.KEY_STEPS:
            assert at_rest or key_step_due or self.now - self.seen_at >= MAX_DELAY
        if self.gate.apply is Apply.ROLLOUT_START:
            assert not any(rollout.versions for rollout in self.rollouts.values()), "a rollout in flight would have two versions"

    def first_token(self, rollout: Rollout) -> None:
        if self.gate.apply is Apply.KEY_STEPS and rollout.draws_key_step and not self.held:
            assert self.version == self.published, "a key step is begun with older weights than there are"


EVENTS = st.lists(
    st.tuples(st.sampled_from(["request", "key request", "answer", "release", "publish", "pass", "hold"]), st.integers(0, 5)), min_size=1, max_size=60
)


@given(apply=st.sampled_from(Apply), events=EVENTS)
@settings(max_examples=400, deadline=None)
def test_updates_are_taken_up_when_the_mode_says_for_all_orders_of_events(apply: Apply, events: list[tuple[str, int]]) -> None:
    world = World(ApplyGate(apply, max_delay_seconds=MAX_DELAY))
    for name, number in events:
        world.event(name, number)
        if apply is Apply.ROLLOUT_START:
            assert all(len(rollout.versions) <= 1 for rollout in world.rollouts.values())
        if apply is Apply.KEY_STEPS and world.seen_at is not None:
            assert world.now - world.seen_at < MAX_DELAY
    world.held = False
    for number in list(world.rollouts):  # everything in flight ends: nothing may wait any more
        if world.rollouts[number].running or world.rollouts[number].versions:
            world.event("answer", number)
            world.event("release", number)
    world.event("pass", int(MAX_DELAY))
    assert world.version == world.published
    assert not any(rollout.waiting for rollout in world.rollouts.values()), "somebody waits for ever"


def test_the_delay_is_counted_from_the_first_update_that_had_to_wait() -> None:
    gate = ApplyGate(Apply.KEY_STEPS, max_delay_seconds=MAX_DELAY)
    assert not gate.allows(now=1.0, at_rest=False, key_step_due=False)
    assert not gate.allows(now=4.0, at_rest=False, key_step_due=False)  # another one was published meanwhile
    assert gate.allows(now=6.0, at_rest=False, key_step_due=False)
    gate.applied(6.0)
    assert (gate.delay_seconds, gate.num_applied, gate.pending) == (5.0, 1, False)


def test_a_held_sampler_serves_new_rollouts_although_an_update_waited() -> None:
    gate = ApplyGate(Apply.ROLLOUT_START, max_delay_seconds=0.0)
    gate.begin(RolloutKey(1, 0, 0))
    assert not gate.allows(now=0.0, at_rest=True, key_step_due=True)
    assert not gate.admits(RolloutKey(2, 0, 0)) and gate.admits(RolloutKey(1, 0, 0))
    gate.withdraw()
    assert gate.admits(RolloutKey(2, 0, 0))
