"""Which way to run: split, engines x tensor parallel, slots, staleness, quorum, batch; sync too.

Pruned by what the closed forms say of their own shape: with more samplers production rises and consumption falls, so the best split
lies where they cross (PipelineRL, arXiv 2509.19128: N / (1 + tau U(H))); more slots and more staleness never slow a run, so the
least of them that loses nothing is proposed. The best few can then be checked by simulation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from headrace.errors import ConfigError, Problem
from headrace.planner.estimate import Setup, Steady, engine_work, mean_context, steady_state, update_seconds
from headrace.planner.plan import Request
from headrace.planner.profile import Profile
from headrace.planner.roofline import DEFAULT_EFFICIENCIES, with_tensor_parallel
from headrace.planner.rounds import usable_slots

TIE = 0.005
"""Rates within this share of each other count as equal; then less staleness and fewer slots win."""
FLAT = 0.07
"""Of the best rate: what the flat region may lose."""
_QUORUM_SHARE = 0.75
"""Of a group, where a quorum is tried."""
_QUORUM_GAIN = 0.02
"""A quorum trains late members apart; it must gain at least that."""
_MOST_PARALLEL = 8
_MOST_SLOTS = 1024
_BEYOND_MEASURED = 2
"""Times the largest measured batch that slots may reach."""
_AHEAD = 1.04
"""Production / consumption that a proposal keeps where it can: chance lets the learner wait where they are just equal."""
_AGE_MARGIN = 1.5
"""Times the mean age of a token at the end of its group that a proposed bound leaves."""
_ALL_SPLITS = 64
"""Up to so many splits every one is looked at, beyond that a ladder and the neighbourhood of the best."""
_MOST_OF_A_ROUND = 8192
"""Rollouts of one sampler in a synchronous batch, where there are other splits: its closed form takes long."""
_LADDER = 24
_TOLD = 8
"""Up to so many splits the table shows all."""
_OPTIMIZER_BYTES = 16.0
"""Of a trained parameter: weights, gradient and two moments, partly in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A setup and its steady state in closed form."""

    setup: Setup
    tensor_parallel: int
    steady: Steady

    @property
    def rate(self) -> float:
        """Trajectories a second through the whole run."""
        return self.setup.batch_trajectories / self.steady.step_seconds

    @property
    def num_sampler_devices(self) -> int:
        return self.setup.num_samplers * self.tensor_parallel

    @property
    def num_devices(self) -> int:
        colocated = self.setup.placement == "colocated"
        return max(self.num_sampler_devices, self.setup.num_learner_ranks) if colocated else self.num_sampler_devices + self.setup.num_learner_ranks

    @property
    def split(self) -> str:
        return f"{self.setup.num_learner_ranks}:{self.num_sampler_devices}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """By throughput; the first is the best."""

    candidates: tuple[Candidate, ...]
    """One of each split worth telling of, the best colocated and the best split synchronous one among them."""
    curve: tuple[Candidate, ...]
    """Splits of the best asynchronous one's engines, by number of samplers, all with its slots and staleness bound at most."""
    flat: tuple[Candidate, Candidate] | None
    """The splits with fewest and with most samplers that are within `FLAT` of the best asynchronous one."""


def adapted(profile: Profile, group_size: int) -> Profile:
    """The profile for groups of another size: how far the longest member exceeds the mean then follows from the lengths."""
    if group_size == profile.group.size:
        return profile
    tailness = profile.distributions.answer_tokens.tailness(group_size)
    return replace(profile, group=replace(profile.group, size=group_size, tailness=tailness, seconds_tailness=None, draw_to_end=None))


def check_request(request: Request) -> None:
    """Raises ConfigError with everything that is wrong with it."""
    problems = [
        Problem(
            key="--batch", value=batch, limit=f"a multiple of {request.group_size}",
            message=f"a batch of {batch} trajectories is not a whole number of groups of {request.group_size}.",
            remedy=f"Give --batch {max(1, round(batch / request.group_size)) * request.group_size}, or another --group-size.",
        )
        for batch in request.batch_trajectories
        if batch % request.group_size
    ]  # fmt: skip
    if problems:
        raise ConfigError(problems)


class Search:
    """Of one profile and request. Holds every steady state it has computed."""

    def __init__(self, profile: Profile, request: Request) -> None:
        check_request(request)
        self.profile, self.request = adapted(profile, request.group_size), request
        self._steady = lru_cache(maxsize=None)(self._compute)
        self._ranks = lru_cache(maxsize=None)(self._best_ranks)

    # what may be chosen ---------------------------------------------------------------------------------------------------

    @property
    def least_learner_devices(self) -> int:
        """Where weights, gradient and optimizer states fit; only asked of estimates, a measured run has shown that they do."""
        memory = self.profile.hardware.memory_bytes
        if not self.profile.estimated or not memory:
            return 1
        states = self.profile.model.num_parameters * _OPTIMIZER_BYTES
        return max(1, math.ceil(states / (memory * DEFAULT_EFFICIENCIES.usable_memory)))

    def parallels(self) -> list[int]:
        """Devices of one sampler: the profile's, and multiples that one machine may hold. CPUs are taken as they come."""
        own = self.profile.model.tensor_parallel
        if self.profile.hardware.device.lower().startswith("cpu"):
            return [own]
        return [own * factor for factor in (1, 2, 4, 8) if factor == 1 or own * factor <= min(_MOST_PARALLEL, self.request.num_gpus)]

    @lru_cache(maxsize=8)  # noqa: B019 - lives as long as the search, which is short
    def engine(self, tensor_parallel: int) -> Profile:
        return with_tensor_parallel(self.profile, tensor_parallel)

    @lru_cache(maxsize=8)  # noqa: B019
    def most_slots(self, tensor_parallel: int) -> int:
        """What memory holds, or what measurements reach."""
        engine = self.engine(tensor_parallel)
        measured = max(point.running for point in engine.decode.points)
        most = min(_MOST_SLOTS, max(engine.decode.saturation.running, int(measured * (1 if engine.estimated else _BEYOND_MEASURED))))
        return max(1, int(usable_slots(engine_work(engine, most), mean_context(engine))))

    def bounds(self) -> list[int]:
        """Staleness bounds of asynchronous plans, ascending; 0 is the synchronous order."""
        most = self.request.max_staleness
        return sorted({bound for bound in (1, 2, 4, 8, 16, 32, 64, most) if 0 < bound <= most})

    def _best_ranks(self, batch: int) -> list[int]:
        """Learner ranks to use of 0, 1, 2, ... available ones: more do not always learn faster, gradients must be exchanged.

        Each has a trajectory at least.
        """
        setup = self._setup(mode="sync", engines=1, ranks=1, slots=1, batch=batch, bound=0)
        chosen, best, least = [0], math.inf, self.least_learner_devices
        for ranks in range(1, self.request.num_gpus + 1):
            if ranks > max(batch, least):
                chosen.append(chosen[-1])
                continue
            seconds = update_seconds(self.profile, replace(setup, num_learner_ranks=ranks))
            better = seconds < best or ranks <= least
            chosen.append(ranks if better else chosen[-1])
            best = seconds if better else best
        return chosen

    # evaluation -----------------------------------------------------------------------------------------------------------

    def _compute(self, tensor_parallel: int, setup: Setup) -> Steady:
        return steady_state(self.engine(tensor_parallel), setup)

    def candidate(self, tensor_parallel: int, setup: Setup) -> Candidate:
        return Candidate(setup=setup, tensor_parallel=tensor_parallel, steady=self._steady(tensor_parallel, setup))

    def _setup(self, *, mode: str, engines: int, ranks: int, slots: int, batch: int, bound: int, colocated: bool = False) -> Setup:
        return Setup(
            mode="sync" if mode == "sync" else "async", placement="colocated" if colocated else "split", num_samplers=engines, num_learner_ranks=ranks,
            slots_per_sampler=slots, batch_trajectories=batch, max_staleness=bound,
        )  # fmt: skip

    def split(self, parallel: int, engines: int, batch: int, *, mode: str = "async") -> Candidate:
        """So many engines sample, the rest learns, with as many slots and as much staleness as may be."""
        ranks = self._ranks(batch)[self.request.num_gpus - engines * parallel]
        bound = self.request.max_staleness if mode == "async" else 0
        setup = self._setup(mode=mode, engines=engines, ranks=ranks, slots=self.most_slots(parallel), batch=batch, bound=bound)
        return self.candidate(parallel, setup)

    def most_engines(self, parallel: int) -> int:
        """That leave the learner enough; 0: none."""
        return max(0, (self.request.num_gpus - self.least_learner_devices) // parallel)

    def asynchronous(self, parallel: int, batch: int) -> list[Candidate]:
        """Splits by number of samplers: all, or around the crossing of production and consumption, and a ladder."""
        most = self.most_engines(parallel)
        if most < 1 or self.request.max_staleness < 1:
            return []
        if most <= _ALL_SPLITS:
            return [self.split(parallel, engines, batch) for engines in range(1, most + 1)]
        crossing = _first(1, most, lambda engines: self._samplers_suffice(parallel, engines, batch))
        chosen = {*_ladder(1, most, _LADDER), *range(max(1, crossing - 4), min(most, crossing + 4) + 1)}
        return [self.split(parallel, engines, batch) for engines in sorted(chosen)]

    def _samplers_suffice(self, parallel: int, engines: int, batch: int) -> bool:
        steady = self.split(parallel, engines, batch).steady
        return steady.production_rate >= steady.consumption_rate

    def synchronous(self, parallel: int, batch: int) -> list[Candidate]:
        """All devices in turn, and the best split."""
        found = self._colocated(parallel, batch)
        most = self.most_engines(parallel)
        if most and parallel == self.profile.model.tensor_parallel:
            found.append(self.split(parallel, self._best_sync_engines(parallel, batch, most), batch, mode="sync"))
        return found

    def _colocated(self, parallel: int, batch: int) -> list[Candidate]:
        total = self.request.num_gpus
        if total < max(parallel, self.least_learner_devices):
            return []
        slots = self.most_slots(parallel)
        setup = self._setup(mode="sync", engines=total // parallel, ranks=total, slots=slots, batch=batch, bound=0, colocated=True)
        return [self.candidate(parallel, setup)]

    def _best_sync_engines(self, parallel: int, batch: int, most: int) -> int:
        """generate + learn: the one falls and the other rises with the samplers, their sum has one valley."""
        low, high = min(most, math.ceil(batch / _MOST_OF_A_ROUND)), most
        while high - low > 2:
            third = (high - low) // 3
            left, right = low + third, high - third
            seconds = [self.split(parallel, engines, batch, mode="sync").steady.step_seconds for engines in (left, right)]
            low, high = (low, right) if seconds[0] <= seconds[1] else (left, high)
        return min(range(low, high + 1), key=lambda engines: self.split(parallel, engines, batch, mode="sync").steady.step_seconds)

    # choice ---------------------------------------------------------------------------------------------------------------

    def run(self) -> Found:
        """Empty where the devices are too few for any plan."""
        kinds = list(itertools.product(self.parallels(), self.request.batch_trajectories))
        curves = {kind: each for kind in kinds if (each := self.asynchronous(*kind))}
        chosen: list[Candidate] = []
        curve: list[Candidate] = []
        flat = None
        if curves:
            own = max(curves, key=lambda kind: max(one.rate for one in curves[kind]))
            # more devices a sampler must pay: the profile's own are preferred in a tie
            own = min((kind for kind in curves if _top(curves[kind]).rate >= (1 - TIE) * _top(curves[own]).rate), key=lambda kind: kind[0])
            curve = curves[own]
            flat = self._flat(own[0], own[1], curve)
            chosen = self._worth_telling(own[0], own[1], curve, flat) + [_top(each) for kind, each in curves.items() if kind != own]
        chosen = [self.settled(each) for each in chosen]
        if chosen:
            chosen.append(self._in_order(_top(chosen)))
        synchronous = [each for kind in kinds for each in self.synchronous(*kind)]
        for placement in ("colocated", "split"):
            alike = [each for each in synchronous if each.setup.placement == placement]
            chosen += [self.settled(_top(alike))] if alike else []
        return Found(candidates=tuple(ranked(chosen)), curve=tuple(curve), flat=flat)

    def _flat(self, parallel: int, batch: int, curve: Sequence[Candidate]) -> tuple[Candidate, Candidate]:
        best = _top(curve)
        least = (1 - FLAT) * best.rate
        middle, most = best.setup.num_samplers, self.most_engines(parallel)
        first = _first(1, middle, lambda engines: self.split(parallel, engines, batch).rate >= least)
        beyond = _first(middle, most + 1, lambda engines: engines > most or self.split(parallel, engines, batch).rate < least)
        return self.split(parallel, first, batch), self.split(parallel, max(middle, beyond - 1), batch)

    def _worth_telling(self, parallel: int, batch: int, curve: Sequence[Candidate], flat: tuple[Candidate, Candidate]) -> list[Candidate]:
        """All splits of a few devices; of many the best, the ends of the flat region, what lies between, and what too few and too many do."""
        most = self.most_engines(parallel)
        if most <= _TOLD:
            return list(curve)
        best, first, last = (each.setup.num_samplers for each in (_top(curve), *flat))
        chosen = {best, first, last, (first + best) // 2, (best + last) // 2, max(1, first // 2), (last + most) // 2}
        return [self.split(parallel, engines, batch) for engines in sorted(chosen)]

    def settled(self, candidate: Candidate) -> Candidate:
        """The same split with the fewest slots and the tightest staleness bound that lose nothing; a quorum where it pays."""
        least = (1 - TIE) * candidate.rate
        parallel, setup = candidate.tensor_parallel, candidate.setup
        if setup.mode == "async" and (gained := self._with_quorum(candidate)) is not None:
            candidate, setup, least = gained, gained.setup, (1 - TIE) * gained.rate
        if setup.mode == "sync":  # never more than a batch
            return self.candidate(parallel, replace(setup, slots_per_sampler=min(setup.slots_per_sampler, self._share_of_batch(setup))))
        # where admission holds the samplers back slots lie empty and cost nothing
        slots = setup.slots_per_sampler if candidate.steady.bottleneck == "admission" else self._fewest_slots(candidate, least)
        setup = replace(setup, slots_per_sampler=slots)
        # a bound that rollouts outgrow while they are written would leave their tokens out of the loss
        aged = _AGE_MARGIN * self.candidate(parallel, setup).steady.staleness.in_flight
        bounds = [bound for bound in self.bounds() if bound >= aged] or [setup.max_staleness]
        bound = _least(bounds, lambda bound: self.candidate(parallel, replace(setup, max_staleness=bound)).rate >= least)
        return self.candidate(parallel, replace(setup, max_staleness=bound))

    def _share_of_batch(self, setup: Setup) -> int:
        """Of one sampler."""
        return math.ceil(setup.batch_trajectories / setup.num_samplers)

    def _fewest_slots(self, candidate: Candidate, least_rate: float) -> int:
        """So few that samplers that outrun the learner do not fill the pool with what only grows old, but somewhat ahead of it."""
        setup, steady = candidate.setup, candidate.steady
        ahead = min(steady.production_rate, _AHEAD * steady.consumption_rate) * (1 - TIE)

        def enough(slots: int) -> bool:
            tried = self.candidate(candidate.tensor_parallel, replace(setup, slots_per_sampler=slots))
            return tried.rate >= least_rate and tried.steady.production_rate >= ahead

        return _first(1, setup.slots_per_sampler, enough)

    def _with_quorum(self, candidate: Candidate) -> Candidate | None:
        size = self.request.group_size
        quorum = math.ceil(_QUORUM_SHARE * size)
        if not 2 <= quorum < size:
            return None
        tried = self.candidate(candidate.tensor_parallel, replace(candidate.setup, quorum=quorum))
        return tried if tried.rate > (1 + _QUORUM_GAIN) * candidate.rate else None

    def _in_order(self, candidate: Candidate) -> Candidate:
        """The same, trained in the order in which groups began: no kind of rollout is left behind, all wait for the slowest."""
        setup = replace(candidate.setup, selection="oldest_first", max_staleness=self.request.max_staleness)
        return self.candidate(candidate.tensor_parallel, setup)

    def best_rate(self) -> float:
        """Of any plan but synchronous splits; trajectories/s."""
        rates = [0.0]
        for kind in itertools.product(self.parallels(), self.request.batch_trajectories):
            rates += [each.rate for each in (*self.asynchronous(*kind), *self._colocated(*kind))]
        return max(rates)


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """By throughput; what is within a tie of the best stands behind the one of them with least staleness. No two alike."""
    order = sorted(dict.fromkeys(candidates), key=lambda each: -each.rate)
    if not order:
        return []
    tied = [each for each in order if each.rate >= (1 - TIE) * order[0].rate]
    first = min(
        tied,
        key=lambda each: (
            each.setup.selection == "oldest_first",
            each.setup.quorum is not None,
            each.num_devices,
            each.tensor_parallel,
            each.steady.staleness.mean,
        ),
    )
    return [first, *(each for each in order if each is not first)]


def _top(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest; in a tie the one with least staleness."""
    return ranked(candidates)[0]


def _ladder(low: int, high: int, count: int) -> list[int]:
    """All whole numbers from `low` to `high`, or about `count` of them, dense at both ends."""
    if high - low < count:
        return list(range(low, high + 1))
    half = count // 2
    steps = [(high - low) ** (index / (half - 1)) / 2 for index in range(half)]
    return sorted({low, high, *(low + round(step) for step in steps), *(high - round(step) for step in steps)})


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The least number in [low, high] for which it holds, given that it goes on holding; `high` where none is known to."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _least(ladder: Sequence[int], holds: Callable[[int], bool]) -> int:
    return ladder[_first(0, len(ladder) - 1, lambda index: holds(ladder[index]))]
