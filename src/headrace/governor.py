"""Keeps a run from harming itself: judges every update, lowers and raises the staleness bound, and says when the run has failed.

    updated, empty   takes: what became of a batch, its mean reward     gives: a bound to the pool, events
                     raises: DivergedError or RollBackError on failure

Three judgements, each pure and alone:

* `StalenessLoop`: the effective sample size and KL(sampler || learner) say how far the data are from the policy. Updates that miss a target
  halve the bound, many good ones raise it by one batch; between the two nothing moves. A bound that has failed is tried again more and more
  rarely: the wait doubles each time.
* `RewardWatch`: whether the run has lost what it had gained.
* refused and collapsed updates in a row.

What is refused is decided by the learner, before the step (learner/guard.py). A healthy run is not touched: no event, no other bound.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from enum import StrEnum
from statistics import fmean
from typing import Any

from headrace import events as ev
from headrace.checkpointing import Restore
from headrace.config import Mode, OnFailure, Settings
from headrace.errors import DivergedError, RollBackError
from headrace.pool.pool import ExperiencePool
from headrace.roles import EventSink
from headrace.types import PolicyVersion
from headrace.updates import UpdateResult, UpdateStatistics

LOOSEN_PATIENCE = 4
"""Times governor.patience_updates: good updates in a row before the bound is raised."""
MAX_CAUTION = 8
"""Times longer than that at most."""
STANDARD_ERRORS = 7.0
"""A fall of the reward within so many is noise: the best level of a run is some over its mean by chance. Of 3,000 runs of 200 independent
normal batches that gained nothing 9 were misjudged."""
_STEPS = 256
REWARD_BATCHES = 10
"""Whose mean is the level of the reward."""
RECENT_BATCHES = 3
"""Whose reward says whether a checkpoint is worth making."""
RECENT_ERRORS = 1.0
"""Standard errors that it may lie under the best level: to save later costs little, to go back to bad weights everything."""
LASTING = 2
"""Times governor.patience_updates: updates in a row that miss a target, after which a run that may go back does."""
COLLAPSE_TOKENS = 500
"""Trained tokens that collapsed updates in a row hold at least when they count as failure: of fewer, one strange token can make the sample size."""
MAX_SKIPPED = 10
"""Times learner.max_refused_updates in a row: so many end a run that skips them, too."""


class Action(StrEnum):
    TIGHTENED = "tightened"
    LOOSENED = "loosened"
    REFUSED = "refused"
    HELD_BACK = "held_back"
    FAILED = "failed"


class StalenessLoop:
    """The bound in effect, updates: `batch_updates` - 1 to `most`."""

    def __init__(self, *, most: int, batch_updates: int, patience: int, state: Mapping[str, Any] | None = None) -> None:
        self._most, self._least, self._step, self._patience = most, min(most, batch_updates - 1), batch_updates, patience
        state = {"bound": most, "failed": None, "caution": 1, "missed": 0, "good": 0} | dict(state or {})
        self.bound: int = max(self._least, min(most, state["bound"]))
        self._failed: int | None = state["failed"]
        """The bound that was taken back last."""
        self.caution: int = state["caution"]
        """Times longer than usual it waits before it tries that one again."""
        self._missed: int = state["missed"]
        self._good: int = state["good"]

    def state(self) -> dict[str, Any]:
        return {"bound": self.bound, "failed": self._failed, "caution": self.caution, "missed": self._missed, "good": self._good}

    def judged(self, *, missed: bool, roomy: bool) -> Action | None:
        """One update missed its target, or has room below it. Returns what became of the bound, None: nothing."""
        self._missed = self._missed + 1 if missed else 0
        self._good = self._good + 1 if roomy and not missed else 0
        if self._missed >= self._patience and self.bound > self._least:
            self._missed = 0
            self.caution = min(MAX_CAUTION, 2 * self.caution) if self.bound == self._failed else 2
            self._failed = self.bound
            self.bound = self._least + (self.bound - self._least) // 2 // self._step * self._step
            return Action.TIGHTENED
        higher = min(self._most, self.bound + self._step)
        tries_again = self._failed is not None and self.bound < self._failed <= higher
        if self._good >= LOOSEN_PATIENCE * self._patience * (self.caution if tries_again else 1) and self.bound < self._most:
            self._good, self.bound = 0, higher
            return Action.LOOSENED
        return None


class RewardWatch:
    """The level of the reward is its mean over the last `batches` batches; noise is known from how much batches in a row differ."""

    def __init__(self, *, drop: float | None, batches: int, state: Mapping[str, Any] | None = None, recent: Iterable[float] = ()) -> None:
        """`drop`: share of the gain (highest - first level) that may be lost; None: nothing is judged. `recent`: the newest batches, where the run
        goes on from them."""
        self._drop = drop
        self._recent: deque[float] = deque(recent, maxlen=batches)
        state = state or {}
        self.first: float | None = state.get("first")
        self.best: float | None = state.get("best")
        self._steps: deque[float] = deque(state.get("steps", ()), maxlen=_STEPS)
        """How much batches in a row differed."""

    def state(self) -> dict[str, Any]:
        return {"first": self.first, "best": self.best, "steps": list(self._steps)}

    @property
    def recent(self) -> tuple[float, ...]:
        """Mean rewards of the newest batches."""
        return tuple(self._recent)

    def seen(self, reward: float) -> None:
        if self._recent:
            self._steps.append(abs(reward - self._recent[-1]))
        self._recent.append(reward)
        if len(self._recent) == self._recent.maxlen:
            level = fmean(self._recent)
            self.first = level if self.first is None else self.first
            self.best = level if self.best is None else max(self.best, level)

    def lost(self) -> str | None:
        """What of the reward is gone for good, for people."""
        known = len(self._recent) == self._recent.maxlen and len(self._steps) >= 2 * REWARD_BATCHES
        if self._drop is None or not known or not self._below(len(self._recent), STANDARD_ERRORS, share=self._drop):
            return None
        return f"the reward fell to {fmean(self._recent):.3g} over {len(self._recent)} batches, it had risen from {self.first:.3g} to {self.best:.3g}"

    def falling(self) -> bool:
        """The newest batches alone look like it, or are too few to say no."""
        if self._drop is None or self.best is None:
            return False
        return len(self._recent) < RECENT_BATCHES or self._below(RECENT_BATCHES, RECENT_ERRORS, share=self._drop / 2)

    def _below(self, batches: int, errors: float, *, share: float) -> bool:
        """The mean of the newest batches is under the best level by that share of the gain and by so many standard errors."""
        if self.best is None or self.first is None:
            return False
        # two draws of a normal variable differ by 2 / sqrt(pi) standard deviations in the mean; one fall is but one step of many
        deviation = fmean(self._steps) * math.sqrt(math.pi) / 2 if self._steps else 0.0
        error = deviation / math.sqrt(batches)
        return fmean(list(self._recent)[-batches:]) < self.best - max(share * (self.best - self.first), errors * error)


class Governor:
    """Of one conductor; after a restore it goes on from what the checkpoint kept of the one before.

    That is all of it, as if nothing had happened, but after a rollback: then what came last and what had been counted in a row is forgotten, so
    that the run has its time to show whether it is better now.
    """

    def __init__(self, settings: Settings, pool: ExperiencePool, events: EventSink, *, restore: Restore | None) -> None:
        state = {} if restore is None else restore.state.get("governor", {})
        counted = {} if restore is None or restore.rolled_back else state.get("counted", {})
        self._rules, self._max_refused = settings.governor, settings.learner.max_refused_updates
        self._adapts = self._rules.adapt_staleness and settings.run.mode is Mode.ASYNC
        self._pool, self._events = pool, events
        self._restored = None if restore is None else restore.version
        self._groups_per_batch = settings.pool.groups_per_batch
        self._loop = StalenessLoop(
            most=settings.max_staleness,
            batch_updates=settings.updates_per_batch,
            patience=self._rules.patience_updates,
            state=state.get("staleness") if self._adapts else None,
        )
        if self._loop.bound < settings.max_staleness:
            pool.bound_staleness(self._loop.bound)
        self._reward = RewardWatch(drop=self._rules.reward_drop, batches=REWARD_BATCHES, state=state.get("reward"), recent=counted.get("recent", ()))
        self._refused: int = counted.get("refused", 0)
        self._collapsed: int = counted.get("collapsed", 0)
        self._collapsed_tokens: int = counted.get("collapsed_tokens", 0)
        self._missed: int = counted.get("missed", 0)
        self._refused_of: deque[bool] = deque(counted.get("refused_of", ()), maxlen=4 * self._max_refused)
        self._flushed_batches: int = counted.get("flushed_batches", 0)
        self._off_target: bool = counted.get("off_target", False)
        """The last update missed a target."""
        self._saved = self._holds_back = False
        self._max_empty = settings.run.max_empty_batches
        self._empty_rewards: list[float] = list(counted.get("empty_rewards", ()))
        self._rewards = list(state.get("rewards", (0, 0.0)))

    # --- what happened ----------------------------------------------------------------------------------------------------

    def updated(self, result: UpdateResult, reward_mean: float) -> None:
        """A batch was learned from. Raises DivergedError or RollBackError when the run has failed."""
        self._note_refusal(result)
        if result.statistics is not None:
            self._judge(result.version_after, result.statistics)
        self._reward.seen(reward_mean)
        self._rewards = [self._rewards[0] + 1, self._rewards[1] + reward_mean]
        self._empty_rewards.clear()
        self._judge_failure(result)

    def empty(self, version: PolicyVersion, reward_mean: float) -> None:
        """A batch without signal was passed over: its reward counts all the same, and one that is lower than before says that a policy
        that collapsed has not come back. Raises as `updated`."""
        self._reward.seen(reward_mean)
        before = self._rewards[1] / max(1, self._rewards[0])
        self._collapsed += bool(self._collapsed) and reward_mean < before
        self._judge_collapse(version, None)
        if (reason := self._reward.lost()) is not None:
            self._fail(version, reason)
        self._empty_rewards.append(reward_mean)
        if len(self._empty_rewards) >= self._max_empty and self._rewards[0] and fmean(self._empty_rewards) < before:
            self._fail_empty(version, before)

    def lets_save(self, version: PolicyVersion) -> bool:
        """Whether the weights are worth going back to. Only where the run may go back by itself are others left unsaved."""
        if self._rules.on_failure is not OnFailure.ROLL_BACK or not (reason := self._ill()):
            self._holds_back = False
            return True
        if not self._holds_back:
            self._emit(Action.HELD_BACK, version, f"no checkpoint is made: {reason}")
        self._holds_back = True
        return False

    def saved(self) -> dict[str, Any]:
        """A checkpoint is made: what it keeps of the governor."""
        self._saved = True
        return self.state()

    def state(self) -> dict[str, Any]:
        """What another one of the same run goes on from, as JSON values."""
        counted = {
            "recent": self._reward.recent, "refused": self._refused, "collapsed": self._collapsed,
            "collapsed_tokens": self._collapsed_tokens, "missed": self._missed,
            "refused_of": list(self._refused_of), "flushed_batches": self._flushed_batches, "off_target": self._off_target,
            "empty_rewards": list(self._empty_rewards),
        }  # fmt: skip
        return {"staleness": self._loop.state(), "reward": self._reward.state(), "rewards": list(self._rewards), "counted": counted}

    # --- judgements -------------------------------------------------------------------------------------------------------

    def _note_refusal(self, result: UpdateResult) -> None:
        made = result.version_after > result.version_before
        if not made and result.refused is None and self._flushed_batches:
            self._flushed_batches -= 1  # what was there when the bound was lowered is over it now
            return
        self._refused = 0 if made else self._refused + 1
        self._refused_of.append(not made)
        if result.refused is not None:
            self._emit(Action.REFUSED, result.version_after, result.refused)

    def _judge(self, version: PolicyVersion, statistics: UpdateStatistics) -> None:
        rules, size, kl = self._rules, statistics.effective_sample_size, statistics.kl_sampler_learner
        collapsed = size < rules.collapse_sample_size or kl > rules.collapse_kl
        self._collapsed = self._collapsed + 1 if collapsed else 0
        self._collapsed_tokens = self._collapsed_tokens + statistics.trained_tokens if collapsed else 0
        missed = size < rules.target_sample_size or kl > rules.target_kl
        self._missed, self._off_target = self._missed + 1 if missed else 0, missed
        if not self._adapts:
            return
        roomy = size >= (1 + rules.target_sample_size) / 2 and kl <= rules.target_kl / 2
        action, before = self._loop.judged(missed=missed, roomy=roomy), self._loop.bound
        if action is None:
            return
        if action is Action.TIGHTENED:
            self._missed = 0  # the new bound may cure it
            self._flushed_batches = math.ceil(self._pool.outstanding_groups / self._groups_per_batch)
        self._pool.bound_staleness(before)
        counted = f"{rules.patience_updates} updates in a row missed" if missed else "for long, all updates were well within"
        self._emit(action, version, f"{counted} {self._targets}: at most {before} updates old from now on", statistics)

    def _judge_failure(self, result: UpdateResult) -> None:
        version, most = result.version_after, self._max_refused
        if result.version_after == result.version_before:
            last = result.refused or "no token was within the staleness bound"
            if self._refused >= most and self._refused % most == 0:
                return self._fail(version, f"{self._refused} updates in a row were refused: {last}")
            if sum(self._refused_of) >= 2 * most:
                count, of = sum(self._refused_of), len(self._refused_of)
                self._refused_of.clear()
                return self._fail(version, f"{count} of the last {of} updates were refused: {last}")
        self._judge_collapse(version, result.statistics)
        if self._rules.on_failure is OnFailure.ROLL_BACK and self._missed >= LASTING * self._rules.patience_updates:
            self._fail(version, f"{self._missed} updates in a row missed {self._targets}", result.statistics)
        if (reason := self._reward.lost()) is not None:
            self._fail(version, reason, result.statistics)

    def _judge_collapse(self, version: PolicyVersion, statistics: UpdateStatistics | None) -> None:
        if self._collapsed < self._rules.collapse_updates or self._collapsed_tokens < COLLAPSE_TOKENS:
            return
        count, self._collapsed, self._collapsed_tokens = self._collapsed, 0, 0
        limits = f"effective sample size {self._rules.collapse_sample_size:g} or KL {self._rules.collapse_kl:g}"
        batches = "updates in a row were" if statistics is not None else "batches in a row were without signal or"
        self._fail(version, f"{count} {batches} beyond {limits}", statistics)

    @property
    def _targets(self) -> str:
        return f"effective sample size {self._rules.target_sample_size:g} or KL {self._rules.target_kl:g}"

    def _ill(self) -> str | None:
        if self._refused:
            return "the last update was refused"
        if self._off_target or self._collapsed:
            return "the policy is far from its data"
        return "the reward falls" if self._reward.falling() else None

    # --- what is done -----------------------------------------------------------------------------------------------------

    def _fail(self, version: PolicyVersion, reason: str, statistics: UpdateStatistics | None = None) -> None:
        self._emit(Action.FAILED, version, reason, statistics)
        if self._rules.on_failure is OnFailure.ROLL_BACK:
            older = None if self._restored is None or self._saved else max(0, self._restored.number - 1)  # where it went back to was no good either
            raise RollBackError(reason, learning_rate_factor=self._rules.learning_rate_factor, newest_update=older, limit=self._rules.max_roll_backs)
        if self._rules.on_failure is OnFailure.STOP or self._refused >= MAX_SKIPPED * self._max_refused:
            raise DivergedError(
                f"{reason}.".replace("..", "."),
                remedy="Lower learner.learning_rate or pool.max_staleness, start from an earlier checkpoint, or set governor.on_failure = 'roll_back'.",
            )

    def _fail_empty(self, version: PolicyVersion, before: float) -> None:
        """The policy solves nothing any more. Where the run may not go back, setbacks.py ends it with the same cause."""
        if self._rules.on_failure is OnFailure.ROLL_BACK:
            count, now = len(self._empty_rewards), fmean(self._empty_rewards)
            self._fail(version, f"{count} batches in a row held no group with different rewards, their mean is {now:.3g}, it had been {before:.3g}")

    def _emit(self, action: Action, version: PolicyVersion, reason: str, statistics: UpdateStatistics | None = None) -> None:
        self._events.emit(
            ev.Governed(
                action=action,
                reason=reason,
                version=version.number,
                lineage=version.lineage,
                max_staleness=self._pool.max_staleness,
                effective_sample_size=None if statistics is None else statistics.effective_sample_size,
                kl_sampler_learner=None if statistics is None else statistics.kl_sampler_learner,
            )
        )
