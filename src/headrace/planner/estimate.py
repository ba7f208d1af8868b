"""What a run does in its steady state, in closed form: pure functions of a profile and a setup.

The search prunes with these; the simulated runtime checks the best. Every formula names its source. Units: seconds, trajectories
a second; staleness in updates, of the mean trained token unless said otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.planner.profile import Profile
from headrace.planner.rounds import EngineWork, most_in_flight, pace, play_round
from headrace.planner.staleness import Staleness, draw_to_end, mean_staleness, resequencing_seconds

Selection = Literal["oldest_first", "ready_first"]
_ROUNDS = 30
"""Of the bisections below; each halves the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One way to run: what a plan proposes."""

    mode: Literal["sync", "async"]
    placement: Literal["split", "colocated"]
    num_samplers: int
    """Engines; each on `profile.model.tensor_parallel` devices. Colocated: as many as fit on all devices."""
    num_learner_ranks: int
    """Devices that learn. Colocated: all."""
    slots_per_sampler: int
    batch_trajectories: int
    max_staleness: int = 0
    selection: Selection = "ready_first"
    quorum: int | None = None
    """Members at which a group may be trained; None: all."""
    max_in_flight: int | None = None
    """Rollouts of one sampler, waiting ones included; None: only admission bounds them."""
    micro_batch_tokens: int | None = None
    gather_seconds: float = 0.003
    """How long a rollout in its environment keeps its slot (sampler.gather_seconds)."""
    queue_share: float = 0.25
    """Rollouts that may queue for a slot, as a share of the slots (sampler.queue_share)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """The steady state of a setup."""

    step_seconds: float
    """From one update to the next."""
    production_rate: float
    """Trajectories/s that the samplers finish when nothing holds them back but admission."""
    consumption_rate: float
    """Trajectories/s that the learner takes when batches are always ready."""
    generate_seconds: float
    """Of one batch at the production rate; sync: of the round."""
    learn_seconds: float
    """Of one update with handing over and publishing."""
    running: float
    """Sequences in a decode step of one sampler, mean."""
    in_flight: float
    """Rollouts started and not finished, all samplers, mean."""
    rollout_seconds: float
    """Of one rollout, mean."""
    staleness: Staleness
    sampler_idle_fraction: float
    learner_idle_fraction: float
    occupancy: float
    """Mean over devices (DESIGN section 2)."""
    busy_fraction: float
    bottleneck: Literal["samplers", "learner", "admission", "both in turn"]
    relative_error: float
    """Standard deviation of actual / predicted step seconds, from the fits that it rests on."""

    @property
    def rate(self) -> float:
        """Trajectories/s through the whole run."""
        return min(self.production_rate, self.consumption_rate) if self.bottleneck != "both in turn" else self.production_rate


# the parts ------------------------------------------------------------------------------------------------------------


def engine_work(profile: Profile, slots: int) -> EngineWork:
    """What decoding takes on one engine of the profile."""
    lengths = profile.distributions
    answers, prompts = max(lengths.answer_tokens.mean, 1e-9), lengths.prompt_tokens.mean
    several = lengths.steps.mean > 1.5
    return EngineWork(
        fit=profile.decode.fit,
        slots=slots,
        kv_capacity_tokens=profile.decode.kv_capacity_tokens,
        gap_seconds=profile.decode.gap_seconds,
        gap_per_sequence=profile.decode.gap_seconds_per_sequence,
        extra_per_token=prompts / answers,
        start_context=prompts / max(1.0, lengths.steps.mean) if several else prompts,
        context_growth=1.0 + prompts / answers if several else 1.0,
        delay_steps=profile.decode.answer_delay_steps * lengths.steps.mean / answers,
    )


def mean_context(profile: Profile) -> float:
    """Context tokens of a running sequence in the steady state: the mean token of the mean rollout sees E[A^2] / (2 E[A]) before it."""
    work, answers = engine_work(profile, 1), profile.distributions.answer_tokens
    if answers.mean <= 0:
        return work.start_context
    return work.start_context + work.context_growth * (answers.mean**2 + answers.deviation**2) / (2 * answers.mean)


def wait_seconds(profile: Profile) -> float:
    """Of one rollout in its environment."""
    return profile.distributions.steps.mean * profile.distributions.tool_wait_seconds.mean


def sampler_rate(profile: Profile, slots: int, in_flight: float) -> tuple[float, float]:
    """(trajectories/s, mean running) of one engine that holds `in_flight` rollouts: Little's law with decode as a shared server."""
    if in_flight <= 0:
        return 0.0, 0.0
    answers = max(profile.distributions.answer_tokens.mean, 1e-9)
    running, per_token = pace(engine_work(profile, slots), in_flight, mean_context(profile), wait_seconds(profile) / answers)
    return in_flight / (per_token * answers), running


def most_of_one_sampler(profile: Profile, setup: Setup) -> float:
    """Rollouts in flight that one worker holds when admission does not bound it."""
    wait = wait_seconds(profile) / max(profile.distributions.answer_tokens.mean, 1e-9)
    most = most_in_flight(engine_work(profile, setup.slots_per_sampler), mean_context(profile), wait, setup.gather_seconds, setup.queue_share)
    return most if setup.max_in_flight is None else min(most, float(setup.max_in_flight))


def learn_seconds(profile: Profile, ranks: int, batch_trajectories: float, micro_batch_tokens: int | None = None) -> float:
    """Of one update in the learner, without handing over and publishing."""
    lengths = profile.distributions
    each = profile.learn.tokens_per_trajectory or lengths.prompt_tokens.mean + lengths.answer_tokens.mean
    return profile.learn.fit.seconds(ranks, micro_batch_tokens or profile.learn.micro_batch_tokens, batch_trajectories * each)


def update_seconds(profile: Profile, setup: Setup) -> float:
    """The learner's whole time of one update: batch there, learn, publish."""
    learning = learn_seconds(profile, setup.num_learner_ranks, setup.batch_trajectories, setup.micro_batch_tokens)
    return learning + profile.learn.handover_seconds + profile.weight_update.publish_seconds


def group_seconds_factor(profile: Profile, quorum: int | None = None) -> float:
    """E[seconds until a group may be trained] / E[seconds of a rollout]: its longest member, or with a quorum the one that completes it."""
    full = profile.group.seconds_tailness or profile.group.tailness
    size = profile.group.size
    if quorum is None or quorum >= size:
        return full
    lengths = profile.distributions.answer_tokens
    # the quorum-th of `size` lies near level quorum / (size + 1) of the distribution
    at_quorum = lengths.quantile(quorum / (size + 1)) / max(lengths.table_mean, 1e-9)
    return min(full, at_quorum)


# whole runs -----------------------------------------------------------------------------------------------------------


def steady_state(profile: Profile, setup: Setup) -> Steady:
    """Of any setup. max_staleness = 0 in async equals sync on the same split (DESIGN section 5)."""
    if setup.mode == "sync" or setup.max_staleness == 0:
        return sync_step(profile, setup)
    return async_step(profile, setup)


def sync_step(profile: Profile, setup: Setup) -> Steady:
    """generate + learn + hand over + publish, one after the other; samplers take the weights up before they go on.

    All sources agree on the sum (verl's tables add up to a few per cent). Staleness 0: nothing is trained that older weights drew.
    """
    lengths = profile.distributions
    count = max(1, round(setup.batch_trajectories / setup.num_samplers))
    answers = lengths.answer_tokens.stratified(count)
    answers[-1] = max(answers[-1], lengths.answer_tokens.expected_max(setup.batch_trajectories))
    waits = _waits(profile, answers)
    capacity = profile.decode.saturation.running
    work = engine_work(profile, setup.slots_per_sampler)
    # where rollouts queue for slots their order counts: the longest may start first or last, and all engines wait for the slowest
    orders = 1 if count <= setup.slots_per_sampler or wait_seconds(profile) > 0 else 8
    mixed = [_order(count, orders, shift) for shift in range(orders)]
    rounds = [play_round(work, [answers[index] for index in order], [waits[index] for index in order], capacity) for order in mixed]
    rounds.sort(key=lambda each: each.seconds)
    one = rounds[orders // 2]
    slowest = [((rank + 1) / orders) ** setup.num_samplers - (rank / orders) ** setup.num_samplers for rank in range(orders)]
    generate = sum(chance * each.seconds for chance, each in zip(slowest, rounds, strict=True))
    learn = update_seconds(profile, setup) + profile.weight_update.transfer_seconds
    step = generate + learn
    learning = learn_seconds(profile, setup.num_learner_ranks, setup.batch_trajectories, setup.micro_batch_tokens)
    learner_busy = profile.learn.busy_fraction * learning / step
    occupied, sampler_busy = one.occupied_seconds / step, one.busy_seconds / step
    colocated = setup.placement == "colocated"
    share = 1.0 if colocated else _sampler_share(profile, setup)
    worked, occupied = profile.decode.work_share * sampler_busy, profile.decode.work_share * occupied
    rollout = one.rollout_seconds / count
    return Steady(
        step_seconds=step,
        production_rate=setup.batch_trajectories / step if colocated else setup.batch_trajectories / generate,
        consumption_rate=setup.batch_trajectories / learn,
        generate_seconds=generate,
        learn_seconds=learn,
        running=one.occupied_seconds / max(one.busy_seconds, 1e-12) * capacity,
        in_flight=setup.batch_trajectories * rollout / step,
        rollout_seconds=rollout,
        staleness=Staleness(in_flight=0.0, in_pool=0.0),
        sampler_idle_fraction=1.0 - sampler_busy,
        learner_idle_fraction=1.0 - learner_busy,
        occupancy=min(1.0, occupied + learner_busy) if colocated else share * occupied + (1 - share) * learner_busy,
        busy_fraction=min(1.0, worked + learner_busy) if colocated else share * worked + (1 - share) * learner_busy,
        bottleneck="both in turn",
        relative_error=_blend(generate, profile.decode.fit.relative_error, learn, profile.learn.fit.relative_error),
    )


def async_step(profile: Profile, setup: Setup) -> Steady:
    """step = max(learn, B / rate), the rate bounded by slots, KV cache, and admission: started and not retired <= (s + 1) B.

    Little's law over one trajectory's way, its group's longest member and the assembly of its batch included, turns the bound into
    rollouts in flight (AReaL, arXiv 2505.24298: floor((N - 1) / B) <= i + eta; SkyRL: at most (s + i) B).
    """
    batch, learn = float(setup.batch_trajectories), update_seconds(profile, setup)
    consumption = batch / learn
    factor = group_seconds_factor(profile, setup.quorum)
    plenty = most_of_one_sampler(profile, setup)
    unbounded = setup.num_samplers * sampler_rate(profile, setup.slots_per_sampler, plenty)[0]
    possible, in_flight = _balanced(profile, setup, learn, factor, plenty, unbounded)
    _, running = sampler_rate(profile, setup.slots_per_sampler, in_flight / setup.num_samplers)
    step, rate = max(learn, batch / possible), min(possible, consumption)
    held = possible < 0.97 * min(unbounded, consumption)
    rollout = in_flight / possible
    if possible > consumption:  # the learner is the slower one: samplers are held back, the pool is full
        in_flight, rollout, running = _throttled(profile, setup, consumption, in_flight)
    staleness = mean_staleness(
        step_seconds=step, learn_seconds=learn, max_staleness=setup.max_staleness, group_seconds=factor * rollout,
        draw_to_end_seconds=rollout * draw_to_end(profile, factor), resequencing=_waiting_for_older(profile, setup, rollout, rate, factor),
        rate_ratio=possible / consumption,
    )  # fmt: skip
    capacity, share = profile.decode.saturation.running, _sampler_share(profile, setup)
    work = engine_work(profile, setup.slots_per_sampler)
    together = max(1.0, running)
    seconds = work.fit.seconds(together, mean_context(profile), work.extra_per_token * together)
    steps_per_second = rate / setup.num_samplers * profile.distributions.answer_tokens.mean / together
    sampler_busy = min(1.0, steps_per_second * seconds)
    learner_busy = profile.learn.busy_fraction * learn_seconds(profile, setup.num_learner_ranks, batch, setup.micro_batch_tokens) / step
    worked = profile.decode.work_share * sampler_busy
    occupied = worked * min(1.0, together / capacity)
    return Steady(
        step_seconds=step, production_rate=possible, consumption_rate=consumption, generate_seconds=batch / possible, learn_seconds=learn,
        running=running, in_flight=in_flight, rollout_seconds=rollout, staleness=staleness,
        sampler_idle_fraction=1.0 - sampler_busy, learner_idle_fraction=1.0 - learner_busy,
        occupancy=share * occupied + (1 - share) * learner_busy, busy_fraction=share * worked + (1 - share) * learner_busy,
        bottleneck="learner" if possible >= consumption else "admission" if held else "samplers",
        relative_error=profile.learn.fit.relative_error if possible >= consumption else profile.decode.fit.relative_error,
    )  # fmt: skip


def littles_law(rate: float, seconds: float) -> float:
    """Items in a system = throughput x time in it, whatever the order and the arrivals."""
    return rate * seconds


def idle_shares(rho: float) -> tuple[float, float]:
    """(samplers, learner) without bounds: a side idles for what the other lacks; rho = sampler / learner rate."""
    return 1.0 - min(1.0, 1.0 / rho) if rho > 0 else 0.0, 1.0 - min(1.0, rho)


def _balanced(profile: Profile, setup: Setup, learn: float, factor: float, plenty: float, unbounded: float) -> tuple[float, float]:
    """(trajectories/s, rollouts in flight) at which samplers make what the admission of just that rate lets them make."""
    batch = float(setup.batch_trajectories)
    admitted = (setup.max_staleness + 1) * batch

    def made(rate: float) -> tuple[float, float]:
        # of what is admitted, one batch is with the learner while it learns, half a batch waits to be whole, some wait for older groups
        room = admitted - batch * min(1.0, learn * rate / batch) - batch / 2
        in_flight = min(room / factor, setup.num_samplers * plenty)
        pause = min(0.9, profile.weight_update.pause_seconds / max(learn, batch / rate))

        def samplers(count: float) -> float:
            return (1.0 - pause) * setup.num_samplers * sampler_rate(profile, setup.slots_per_sampler, count / setup.num_samplers)[0]

        for _ in range(4 if setup.selection == "oldest_first" else 0):
            held_back = rate * _resequencing(profile, setup, in_flight / samplers(in_flight), rate)
            allowed = min(max(batch / 8, room - held_back) / factor, setup.num_samplers * plenty)
            in_flight = (in_flight + allowed) / 2  # longer waits leave less room, which shortens them again
        return samplers(in_flight), in_flight

    low, high = unbounded * 1e-4, unbounded
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if made(middle)[0] >= middle else (low, middle)
    return high, made(high)[1]


# helpers --------------------------------------------------------------------------------------------------------------


def _waits(profile: Profile, answers: Sequence[float]) -> list[float]:
    """Environment seconds of rollouts with these answers: long answers have many steps, and each waits."""
    lengths = profile.distributions
    if lengths.answer_tokens.mean <= 0:
        return [0.0] * len(answers)
    each = wait_seconds(profile) / lengths.answer_tokens.mean if lengths.steps.mean > 1.5 else 0.0
    fixed = 0.0 if lengths.steps.mean > 1.5 else wait_seconds(profile)
    return [fixed + each * answer for answer in answers]


def _order(count: int, orders: int, shift: int) -> list[int]:
    """Indices in an order that has nothing to do with size; the last, the longest, is the (shift + 1/2) / orders-th part of the way down."""
    stride = next(step for step in range(max(1, int(count * 0.618)), count + 2) if math.gcd(step, count) == 1)
    order = [index * stride % count for index in range(count)]
    turn = order.index(count - 1) - int((shift + 0.5) * count / orders)
    return [order[(index + turn) % count] for index in range(count)]


def _sampler_share(profile: Profile, setup: Setup) -> float:
    """Of the devices."""
    sampling = setup.num_samplers * profile.model.tensor_parallel
    return sampling / (sampling + setup.num_learner_ranks)


def _throttled(profile: Profile, setup: Setup, rate: float, most: float) -> tuple[float, float, float]:
    """(in flight, rollout seconds, running) at which the samplers make just `rate`: admission holds them there."""
    low, high = 0.0, most
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        enough = setup.num_samplers * sampler_rate(profile, setup.slots_per_sampler, middle / setup.num_samplers)[0] >= rate
        low, high = (low, middle) if enough else (middle, high)
    _, running = sampler_rate(profile, setup.slots_per_sampler, high / setup.num_samplers)
    return high, high / rate, running


def _waiting_for_older(profile: Profile, setup: Setup, rollout_seconds: float, rate: float, factor: float) -> float:
    """Of the mean token after its own group's end: tokens of long rollouts end late themselves, and wait the less for others."""
    waiting = _resequencing(profile, setup, rollout_seconds, rate)
    answers = profile.distributions.answer_tokens
    if waiting <= 0 or answers.mean <= 0:
        return 0.0
    drawn_after = 0.5 * (1.0 + (answers.deviation / answers.mean) ** 2)
    return max(0.0, waiting + rollout_seconds * (factor - drawn_after - draw_to_end(profile, factor)))


def _resequencing(profile: Profile, setup: Setup, rollout_seconds: float, rate: float) -> float:
    if setup.selection == "ready_first":
        return 0.0
    answers = profile.distributions.answer_tokens
    durations = answers.scaled(rollout_seconds / max(answers.mean, 1e-9))
    return resequencing_seconds(durations, profile.group.size, rate / profile.group.size)


def _blend(first: float, first_error: float, second: float, second_error: float) -> float:
    """Relative error of a sum whose parts err independently."""
    total = first + second
    return math.hypot(first * first_error, second * second_error) / total if total > 0 else 0.0
