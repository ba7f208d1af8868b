"""Scripted sampler, weights, environments and tasks for the virtual clock. They validate what they get.

    weights = ScriptedWeights()
    sampler = ScriptedSampler(max_running=4, seconds_per_token=0.1, weights=weights)
    worker = scripted_worker(sampler, settings=scripted_settings(rollout={"max_steps": 8}))
    async with asyncio.TaskGroup() as group:
        group.create_task(worker.run())
        await worker.start([rollout_request(group_id=0, member=0, task=scripted_task("a", answers=5, wait_seconds=2.0))])
        report = await worker.next_report()
        await worker.stop()

What one rollout does is decided by its task's data, so the conductor's tests script whole runs through the task source:

    scripted_task("slow", answers=3, wait_seconds=60.0, kind="long", key_steps=[1], action_tokens=[4, 2, 9], fail_at=2, reward=1.0)
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fakes.verification import ContractViolation, KeptActions, accepted_spans, another_letter, verified_logprob
from headrace import clock
from headrace.config import Settings
from headrace.marks import TrajectoryView
from headrace.roles import Environment, WaitingFor
from headrace.rollout.user_call import CallWatch, LoopEnvironment, call_on_loop
from headrace.rollout.worker import RolloutWorkerCore
from headrace.types import (
    Action,
    Completion,
    Observation,
    Outcome,
    PolicyVersion,
    RolloutKey,
    RolloutRequest,
    SampleRequest,
    SamplingParameters,
    StopReason,
    Task,
    VerifyRequest,
    VerifyResult,
    VersionSpan,
    WorkerActivity,
)
from headrace.updates import WeightUpdate

END_TOKEN = 0


class CharacterTokenizer:
    """One token a character (its code point); 0 ends, 1 begins the first prompt."""

    eos_token_id: int | None = END_TOKEN
    bos_token_id = 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return ([self.bos_token_id] if add_special_tokens else []) + [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(token) for token in token_ids if not (skip_special_tokens and token < 2))


class ScriptedWeights:
    """What the sampler reads versions from. `publish` makes a version readable; the sampler takes it up by itself."""

    def __init__(self, number: int = 0, lineage: int = 0) -> None:
        self.newest = PolicyVersion(lineage, number)

    def publish(self, number: int, lineage: int = 0) -> WeightUpdate:
        version = PolicyVersion(lineage, number)
        if version < self.newest:
            raise ContractViolation(f"published version falls from {self.newest} to {version}")
        self.newest = version
        return WeightUpdate(version=version, num_bytes=0, publish_seconds=0.0)


@dataclass(slots=True, eq=False)
class _Running:
    request: SampleRequest
    future: asyncio.Future[Completion]
    num_tokens: int
    fail_after: int | None
    tokens: list[int] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)
    discarded: int = 0


@dataclass(slots=True)
class _Known:
    """What the sampler remembers of a rollout between its steps."""

    tokens: tuple[int, ...]
    step: int
    busy: bool = True
    lost: int = 0
    keep_cache: bool = False


class ScriptedSampler:
    """Implements roles.Sampler: each decode step takes `seconds_per_token` and gives every running request one token.

    Tokens depend only on the request's stream key (seed, group_id, member, attempt, step), log-probabilities on it and on the version.
    The number of tokens of an action: `action_tokens(request)` when given, else drawn from the stream, 1 to 6, at most the limit.
    `fail(request)` gives the number of tokens after which the request raises, None for never. `abort` redraws running actions under
    new weights. `applies` False: new weights are never taken up (case 6). Wrong use raises ContractViolation.

    Verification lasts one decode step and accepts everything but what `reject(request)` names: the index of the first rejected token,
    or None; it may raise. `redraw(request, index)` is the token in its place, by default another letter. `can_keep(key)` False: that
    rollout's distributions never fit. `park(key)` and `unpark(key)` say whose action waits. `entropy(request, position)`: nats, measured
    when given. `extends` False: each step's context is its observation alone.
    """

    def __init__(
        self,
        *,
        max_running: int = 8,
        max_context_tokens: int = 4096,
        seconds_per_token: float = 0.01,
        apply_seconds: float = 0.0,
        weights: ScriptedWeights | None = None,
        action_tokens: Callable[[SampleRequest], int] | None = None,
        fail: Callable[[SampleRequest], int | None] = lambda request: None,
        abort: bool = False,
        applies: bool = True,
        reject: Callable[[VerifyRequest], int | None] = lambda request: None,
        redraw: Callable[[VerifyRequest, int], int] | None = None,
        can_keep: Callable[[RolloutKey], bool] = lambda key: True,
        entropy: Callable[[SampleRequest, int], float] | None = None,
        extends: bool = True,
    ) -> None:
        self.max_running = self.most_long = max_running
        self.told_long: set[RolloutKey] = set()
        self.max_context_tokens = max_context_tokens
        self.weights = weights or ScriptedWeights()
        self.requests: list[SampleRequest] = []
        self.verified: list[VerifyRequest] = []
        self.kept = KeptActions(can_keep)
        self.most_running = 0
        self.applies = applies
        self._seconds_per_token = seconds_per_token
        self._apply_seconds = apply_seconds
        self._action_tokens = action_tokens
        self._fail = fail
        self._abort = abort
        self._reject = reject
        self._redraw = redraw
        self._entropy = entropy
        self._extends = extends
        self._parked: dict[RolloutKey, _Running | None] = {}
        self._version = self.weights.newest
        self._queue: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._known: dict[RolloutKey, _Known] = {}
        self._released: set[RolloutKey] = set()
        self._generated = 0
        self._drawn: dict[RolloutKey, int] = {}
        self._held = False
        self._work = asyncio.Event()
        self._version_changed = asyncio.Event()
        self._idle_since: tuple[str, float] | None = None
        self._running_seconds: dict[int, float] = {}
        self._idle_seconds: dict[str, float] = {}
        self._decode_steps = self._sampled = self._applied = self._prefilled = 0

    # roles.Sampler

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._queue) + sum(running is not None for running in self._parked.values())

    @property
    def generated_tokens(self) -> int:
        return self._generated

    async def sample(self, request: SampleRequest) -> Completion:
        known = self._validated(request)
        num_tokens = self._num_tokens(request)
        running = _Running(request, asyncio.get_running_loop().create_future(), num_tokens, self._fail(request))
        self.requests.append(request)
        if request.key in self._parked:
            self._parked[request.key] = running
        else:
            self._queue.append(running)
        self._prefilled += len(request.tokens)
        self._work.set()
        try:
            completion = await running.future
        except BaseException:
            known.lost += len(running.tokens) + running.discarded
            raise
        finally:
            known.busy = False
            if running in self._running:
                self._running.remove(running)
            if running in self._queue:
                self._queue.remove(running)
            if self._parked.get(request.key) is running:
                self._parked[request.key] = None
        known.tokens = (*request.tokens, *completion.tokens)
        if request.keep_distribution:
            self.kept.add(request, completion.tokens)
        return completion

    def release(self, key: RolloutKey) -> int:
        known = self._known.pop(key, None)
        if known is None:
            return 0
        if known.busy:
            raise ContractViolation(f"{key} is released while it is being sampled")
        self._released.add(key)
        return known.lost

    async def applied(self, version: PolicyVersion) -> None:
        while self._version < version:
            self._version_changed.clear()
            await self._version_changed.wait()

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """See `reject`. A redrawn token counts as generated; the rollout may go on from it in the middle of its action."""
        if request.key in self._known:
            raise ContractViolation(f"{request.key} is verified before its rollout has ended")
        self.kept.check(request)
        self.verified.append(request)
        await asyncio.sleep(self._seconds_per_token)
        rejected = self._reject(request)
        self.kept.verified(request)
        accepted = accepted_spans(request, rejected, self._version)
        logprobs = tuple(verified_logprob(request, index, self._version) for span in accepted for index in range(span.start, span.end))
        if rejected is None:
            return VerifyResult(version=self._version, accepted=accepted, logprobs=logprobs)
        step = next(step for step, start, end in request.checked if start <= rejected < end)
        token = another_letter(request, rejected) if self._redraw is None else self._redraw(request, rejected)
        start = request.context_starts[[checked[0] for checked in request.checked].index(step)] if request.context_starts else 0
        tokens = (*request.tokens[start:rejected], token)
        self.kept.cut(request, step, rejected, token)
        self._released.discard(request.key)
        self._known[request.key] = _Known(tokens=tokens, step=step, busy=False, keep_cache=True)
        self._generated += 1
        self._drawn[request.key] = self._drawn.get(request.key, 0) + 1
        redrawn_logprob = verified_logprob(request, rejected, self._version)
        return VerifyResult(
            version=self._version, accepted=accepted, logprobs=logprobs, rejected=rejected, redrawn_token=token, redrawn_logprob=redrawn_logprob
        )

    def can_verify(self, key: RolloutKey) -> bool:
        return self.kept.can_verify(key)

    def forget(self, key: RolloutKey) -> None:
        self.kept.forget(key)

    @property
    def long_rollouts(self) -> frozenset[RolloutKey]:
        """Those that a test has told to be long."""
        return frozenset(self.told_long)

    @property
    def parked(self) -> tuple[RolloutKey, ...]:
        return tuple(key for key, running in self._parked.items() if running is not None)

    def park(self, key: RolloutKey) -> None:
        """The rollout's action, now or when it comes, waits until `unpark`."""
        running = next((each for each in (*self._running, *self._queue) if each.request.key == key), None)
        if running in self._running:
            self._running.remove(running)
        elif running is not None:
            self._queue.remove(running)
        self._parked[key] = running
        self._work.set()

    def unpark(self, key: RolloutKey) -> None:
        if (running := self._parked.pop(key, None)) is not None:
            self._queue.appendleft(running)
        self._work.set()

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        await asyncio.sleep(self._seconds_per_token)
        return [[-1.0] * max(0, len(sequence) - 1) for sequence in sequences]

    def wake(self) -> None:
        self._work.set()

    def hold_weights(self, held: bool) -> None:
        self._held = held
        self._work.set()

    def take_activity(self) -> WorkerActivity:
        self._end_idle()
        busy = sum(self._running_seconds.values())
        activity = WorkerActivity(
            seconds=busy + sum(self._idle_seconds.values()),
            busy_seconds=busy,
            running_seconds=dict(self._running_seconds),
            idle_seconds=dict(self._idle_seconds),
            decode_steps=self._decode_steps,
            prefill_tokens=self._prefilled,
            sampled_tokens=self._sampled,
            apply_seconds=self._apply_seconds * self._applied,
            applied_updates=self._applied,
        )
        self._running_seconds, self._idle_seconds = {}, {}
        self._decode_steps = self._sampled = self._applied = self._prefilled = 0
        return activity

    async def run(self, waiting_for: WaitingFor) -> None:
        while True:
            if self.applies and not self._held and self.weights.newest != self._version:
                await self._apply()
                continue  # newer ones may have come meanwhile, and their wake with them
            while self._queue and len(self._running) < self.max_running:
                self._running.append(self._queue.popleft())
            if not self._running:
                self._work.clear()
                reason = waiting_for()
                if reason not in ("environment", "admission"):
                    raise ContractViolation(f"waiting_for() says {reason!r}")
                self._idle_since = (reason, clock.now())
                await self._work.wait()
                self._end_idle()
                self._idle_since = None
                continue
            await self._decode()

    # Scripted insides

    def num_generated(self, key: RolloutKey) -> int:
        """Tokens drawn for a rollout so far, thrown away or not; counted apart from everything else, token by token."""
        return self._drawn.get(key, 0)

    async def _apply(self) -> None:
        newest = self.weights.newest
        await asyncio.sleep(self._apply_seconds)
        self._idle("weights", self._apply_seconds)
        if self._held:  # pinned meanwhile: these weights come later
            return
        if newest < self._version:
            raise ContractViolation(f"weights fall from {self._version} to {newest}")
        self._version = newest
        self._applied += 1
        if self._abort:
            for running in self._running:
                running.discarded += len(running.tokens)
                running.tokens.clear()
                running.versions.clear()
        self._version_changed.set()

    async def _decode(self) -> None:
        batch = list(self._running)
        self.most_running = max(self.most_running, len(batch))
        await asyncio.sleep(self._seconds_per_token)
        self._running_seconds[len(batch)] = self._running_seconds.get(len(batch), 0.0) + self._seconds_per_token
        self._decode_steps += 1
        for running in batch:
            if running not in self._running:  # cancelled meanwhile
                continue
            if running.fail_after is not None and len(running.tokens) >= running.fail_after:
                self._running.remove(running)
                running.future.set_exception(RuntimeError(f"scripted sampler failure after {running.fail_after} tokens"))
                continue
            running.tokens.append(_scripted_token(running.request, len(running.tokens), running.num_tokens))
            running.versions.append(self._version)
            self._sampled += 1
            self._generated += not running.request.evaluation
            self._drawn[running.request.key] = self._drawn.get(running.request.key, 0) + 1
            if len(running.tokens) == running.num_tokens:
                self._running.remove(running)
                running.future.set_result(_completion(running, self._entropy))

    def _end_idle(self) -> None:
        """Books the idle time so far."""
        if self._idle_since is not None:
            reason, since = self._idle_since
            self._idle(reason, clock.now() - since)
            self._idle_since = (reason, clock.now())

    def _idle(self, reason: str, seconds: float) -> None:
        self._idle_seconds[reason] = self._idle_seconds.get(reason, 0.0) + seconds

    def _num_tokens(self, request: SampleRequest) -> int:
        """Still to be drawn; `action_tokens` gives the length of whole actions."""
        limit = request.sampling.max_action_tokens
        wanted = _stream(request, "length").randint(1, 6) if self._action_tokens is None else self._action_tokens(request)
        return max(1, min(limit, wanted) - request.drawn_tokens)

    def _validated(self, request: SampleRequest) -> _Known:
        key = request.key
        if key in self._released and not (request.evaluation and request.step == 0):  # evaluations repeat their keys
            raise ContractViolation(f"{key} samples after its release")
        if not request.tokens:
            raise ContractViolation(f"{key} samples from an empty context")
        most = request.sampling.max_action_tokens - request.drawn_tokens
        if most < 1 or len(request.tokens) + most > self.max_context_tokens:
            raise ContractViolation(f"{key}: {len(request.tokens)} + {most} tokens, the context has {self.max_context_tokens}")
        if not request.evaluation and request.round != self.kept.round_of(key):
            raise ContractViolation(f"{key} samples in round {request.round} after {self.kept.round_of(key)} verifications")
        known = self._known.get(key)
        if known is None:
            if request.step != 0:
                raise ContractViolation(f"{key} begins with step {request.step}")
            known = self._known[key] = _Known(tokens=tuple(request.tokens), step=0, keep_cache=request.keep_cache)
            return known
        if known.busy:
            raise ContractViolation(f"{key} samples twice at once")
        if request.step != known.step + (request.drawn_tokens == 0):
            raise ContractViolation(f"{key} goes from step {known.step} to {request.step} with {request.drawn_tokens} tokens drawn")
        if request.drawn_tokens and tuple(request.tokens) != known.tokens:
            raise ContractViolation(f"{key} goes on in the middle of step {request.step}, but not after its redrawn token")
        if self._extends and not known.keep_cache:
            raise ContractViolation(f"{key} takes another step although its last request said that none follows")
        if self._extends and tuple(request.tokens[: len(known.tokens)]) != known.tokens:
            raise ContractViolation(f"{key}: step {request.step} does not extend what was sampled before (I4)")
        known.step, known.busy, known.tokens, known.keep_cache = request.step, True, tuple(request.tokens), request.keep_cache
        return known


def _stream(request: SampleRequest, *what: object) -> random.Random:
    verification_round = ("round", request.round) if request.round else ()
    return random.Random(repr((request.seed, *request.key, request.step, *verification_round, *what)))


def _scripted_token(request: SampleRequest, index: int, num_tokens: int) -> int:
    """The last token is a stop token where the request has one and its limit does not cut it short."""
    ends = index + 1 == num_tokens and request.drawn_tokens + num_tokens < request.sampling.max_action_tokens
    if ends and request.sampling.stop_tokens:
        return request.sampling.stop_tokens[0]
    return _stream(request, request.drawn_tokens + index).randint(ord("a"), ord("z"))


def _completion(running: _Running, entropy: Callable[[SampleRequest, int], float] | None) -> Completion:
    request = running.request
    spans: list[VersionSpan] = []
    for index, version in enumerate(running.versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version=version, start=spans[-1].start, end=index + 1)
        else:
            spans.append(VersionSpan(version=version, start=index, end=index + 1))
    cut_short = request.drawn_tokens + running.num_tokens == request.sampling.max_action_tokens
    return Completion(
        tokens=tuple(running.tokens),
        logprobs=tuple(-_stream(request, request.drawn_tokens + index, "p", version).random() for index, version in enumerate(running.versions)),
        version_spans=tuple(spans),
        stop_reason=StopReason.MAX_TOKENS if cut_short else StopReason.STOP,
        discarded_tokens=running.discarded,
        entropies=None if entropy is None else tuple(entropy(request, request.drawn_tokens + index) for index in range(len(running.tokens))),
    )


class ScriptedEnvironment:
    """Async, single-use; does what its task's data says (see scripted_task)."""

    def __init__(self) -> None:
        self._data: Mapping[str, Any] = {}
        self._answered = 0

    async def reset(self, task: Task) -> Observation:
        if self._data:
            raise ContractViolation("an environment is reset twice")
        self._data = task.data
        await asyncio.sleep(task.data["reset_seconds"])
        if task.data["fail_at"] == -1:
            raise RuntimeError(f"scripted failure of task {task.id} at reset")
        return self._observation()

    async def step(self, action: Action) -> Outcome | tuple[Observation | None, float, bool]:
        if not isinstance(action, Action) or not action.tokens:
            raise ContractViolation(f"an environment got {action!r}")
        waits = self._data["wait_seconds"]
        await asyncio.sleep(waits[self._answered % len(waits)] if isinstance(waits, list) else waits)
        if self._answered == self._data["fail_at"]:
            raise RuntimeError(f"scripted failure at step {self._answered}")
        if self._answered == self._data["hang_at"]:
            await asyncio.Event().wait()
        self._answered += 1
        done = self._answered >= self._data["answers"]
        return (None if done else self._observation()), (self._data["reward"] if done else 0.0), done

    def _observation(self) -> Observation:
        return Observation(text=f"{self._answered}?", key=self._data["key_weight"] if self._answered in self._data["key_steps"] else 0.0)


class LoopUserCode:
    """Async user code given as Python objects: `make_environment()` per rollout, `reward(task, answer)`, `mark(trajectory)`; each may be None.

    Implements UserCode of rollout/roll_out without processes, for the virtual clock.
    """

    def __init__(
        self,
        *,
        make_environment: Callable[[], Environment] | None = None,
        reward: Callable[[Task, str], Awaitable[object]] | None = None,
        mark: Callable[[TrajectoryView], Awaitable[object]] | None = None,
        limit_seconds: float = 120.0,
    ) -> None:
        self._make_environment = make_environment
        self._reward = reward
        self._mark = mark
        self._watch = CallWatch(limit_seconds)

    @property
    def has_reward(self) -> bool:
        return self._reward is not None

    def open_environment(self, key: RolloutKey) -> Environment | None:
        if self._make_environment is None:
            return None
        return LoopEnvironment(self._make_environment(), watch=self._watch)

    def release(self, key: RolloutKey) -> None:
        """Nothing is kept by key: the environment goes with its rollout."""

    async def reward(self, task: Task, answer: str) -> object:
        assert self._reward is not None
        return await call_on_loop(self._reward, task, answer, name="reward", watch=self._watch)

    async def mark(self, trajectory: TrajectoryView) -> object:
        assert self._mark is not None
        return await call_on_loop(self._mark, trajectory, name="marks", watch=self._watch)

    def warning(self) -> str | None:
        return self._watch.text()

    async def close(self) -> None:
        """Nothing to end."""


def scripted_task(
    id: str,
    *,
    kind: str = "default",
    answers: int = 1,
    wait_seconds: float | list[float] = 0.0,
    reset_seconds: float = 0.0,
    reward: float = 0.0,
    key_steps: Sequence[int] = (),
    key_weight: float = 1.0,
    action_tokens: Sequence[int] | None = None,
    fail_at: int | None = None,
    hang_at: int | None = None,
) -> Task:
    """A task for ScriptedEnvironment: `answers` actions until done; `wait_seconds` for each of them (a list is cycled through).

    `fail_at`: the step whose environment call raises (-1: reset); `hang_at`: the step that is never answered. `action_tokens`:
    tokens of each action, with `action_tokens_of_task` as the sampler's script.
    """
    data: dict[str, Any] = {
        "prompt": f"task {id}",
        "answers": answers,
        "wait_seconds": wait_seconds,
        "reset_seconds": reset_seconds,
        "reward": reward,
        "key_steps": list(key_steps),
        "key_weight": key_weight,
        "action_tokens": None if action_tokens is None else list(action_tokens),
        "fail_at": fail_at,
        "hang_at": hang_at,
    }
    return Task(id=id, kind=kind, data=data)


def scripted_user_code(*, reward: Callable[[Task, str], Awaitable[object]] | None = None, limit_seconds: float = 120.0) -> LoopUserCode:
    """Environments that do what their tasks say."""
    return LoopUserCode(make_environment=ScriptedEnvironment, reward=reward, limit_seconds=limit_seconds)


def one_step_user_code(reward: Callable[[Task, str], object]) -> LoopUserCode:
    """No environment: the plain function `reward(task, answer)` grades the answer to the task's prompt, at once."""

    async def graded(task: Task, answer: str) -> object:
        return reward(task, answer)

    return LoopUserCode(reward=graded)


def rollout_request(
    *, group_id: int = 0, member: int = 0, attempt: int = 0, task: Task | None = None, seed: int = 0, max_action_tokens: int = 16, evaluation: bool = False
) -> RolloutRequest:
    return RolloutRequest(
        key=RolloutKey(group_id, member, attempt),
        task=task or scripted_task("t"),
        seed=seed,
        sampling=SamplingParameters(max_action_tokens=max_action_tokens, stop_tokens=(END_TOKEN,)),
        evaluation=evaluation,
    )


def scripted_settings(**sections: Mapping[str, Any]) -> Settings:
    """Settings for scripted roles: scripted_settings(rollout={"max_steps": 8}, sampler={"max_in_flight": 4}). No queue for decode slots."""
    defaults = {"rollout": {"max_steps": 64, "max_tokens": 2048, "max_action_tokens": 16}, "sampler": {"queue_share": 0.0}}
    return Settings.model_validate({**defaults, **sections})


def action_tokens_of_task(tasks: Mapping[RolloutKey, Task]) -> Callable[[SampleRequest], int]:
    """Lengths of actions as the tasks' `action_tokens` say (cycled through); 3 where they say nothing."""

    def num_tokens(request: SampleRequest) -> int:
        lengths = tasks[request.key].data["action_tokens"] or [3]
        return int(lengths[request.step % len(lengths)])

    return num_tokens


def scripted_worker(
    sampler: ScriptedSampler, *, name: str = "worker-0", user_code: LoopUserCode | None = None, settings: Settings | None = None
) -> RolloutWorkerCore:
    return RolloutWorkerCore(
        name, sampler=sampler, code=user_code or scripted_user_code(), tokenizer=CharacterTokenizer(), settings=settings or scripted_settings()
    )
