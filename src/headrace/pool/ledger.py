"""The ledger: where every token, trajectory, group and key step went, exact at every moment (DESIGN section 8, I7).

    generated = trained + skipped + expired + filtered + failed + void + pooled + in flight

Three sources that know nothing of each other meet here, so that the check can fail:

* `generated` is what workers say they drew (tokens) and what the pool handed out (trajectories, groups);
* the final classes are booked one by one when something ends;
* `pooled` and `in flight` are counted anew from what the pool really holds; tokens in flight are what workers drew and did not
  deliver, so they must be 0 as soon as no rollout is out.

A trajectory here is one attempt (a retried member counts twice, once as failed); evaluation is kept apart. A trajectory that is
verified goes back to its worker and is in flight until it comes again; what the verification cut off is then skipped.refreshed.

Key steps are offered when they are delivered, those of members that are key as a whole (marks.min_advantage) when their group is ready.
A group without signal has advantage 0: its key steps have no gradient, so they are skipped.filtered, never trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import LedgerError
from headrace.types import RetireReason, TrajectorySummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the pool holds now, counted from its records."""

    groups_in_flight: int
    groups_pooled: int
    """Complete, or taken and not retired."""
    trajectories_in_flight: int
    """Those that are being verified included."""
    trajectories_pooled: int
    tokens_pooled: int
    key_steps_pooled: int
    key_steps_in_flight: int
    """Of what is being verified, as it was delivered; what other rollouts in flight will hold is unknown."""


@dataclass(slots=True)
class Account:
    """Final classes of one unit, and what was put in."""

    generated: int = 0
    trained: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    expired: int = 0
    filtered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    void: int = 0

    def state(self) -> dict[str, Any]:
        """Plain values; `restored` reads them."""
        return {**{name: getattr(self, name) for name in _PLAIN_CLASSES}, "skipped": dict(self.skipped), "failed": dict(self.failed)}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Account:
        return cls(**{name: state[name] for name in _PLAIN_CLASSES}, skipped=Counter(state["skipped"]), failed=Counter(state["failed"]))

    def book(self, reason: RetireReason, count: int, detail: str = "") -> None:
        """`detail` is the reason of what was skipped or failed."""
        match reason:
            case RetireReason.TRAINED:
                self.trained += count
            case RetireReason.SKIPPED:
                _add(self.skipped, detail, count)
            case RetireReason.EXPIRED:
                self.expired += count
            case RetireReason.FILTERED:
                self.filtered += count
            case RetireReason.FAILED:
                _add(self.failed, detail, count)
            case RetireReason.VOID:
                self.void += count

    def classes(self, pooled: int, in_flight: int) -> dict[str, Any]:
        return {
            "generated": self.generated,
            "trained": self.trained,
            "skipped": dict(sorted(self.skipped.items())),
            "expired": self.expired,
            "filtered": self.filtered,
            "failed": dict(sorted(self.failed.items())),
            "void": self.void,
            "pooled": pooled,
            "in_flight": in_flight,
        }


_PLAIN_CLASSES = ("generated", "trained", "expired", "filtered", "void")


@dataclass(slots=True)
class KindAccount:
    """One kind of task, in members (attempts do not count) and tokens: shows who is favoured."""

    offered: int = 0
    retired: Counter[str] = field(default_factory=Counter)
    """RetireReason -> members."""
    trained_tokens: int = 0
    skipped_tokens: Counter[str] = field(default_factory=Counter)

    def state(self) -> dict[str, Any]:
        """Plain values; `restored` reads them."""
        counters = {"retired": dict(self.retired), "skipped_tokens": dict(self.skipped_tokens)}
        return {"offered": self.offered, "trained_tokens": self.trained_tokens, **counters}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> KindAccount:
        return cls(**{**state, "retired": Counter(state["retired"]), "skipped_tokens": Counter(state["skipped_tokens"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What became of one good trajectory's tokens and key steps. They sum to what it holds."""

    trained_tokens: int = 0
    skipped_tokens: Mapping[str, int] = field(default_factory=dict)
    trained_key_steps: int = 0
    over_bound_key_steps: int = 0
    skipped_key_steps: Mapping[str, int] = field(default_factory=dict)

    @property
    def reason(self) -> RetireReason:
        return RetireReason.TRAINED if self.trained_tokens else RetireReason.SKIPPED

    @property
    def main_skip_reason(self) -> str:
        """Of most of its skipped tokens; `empty` when it holds no action token."""
        return max(sorted(self.skipped_tokens), key=lambda reason: self.skipped_tokens[reason], default="empty")


class Ledger:
    """Counts only; the pool tells it what happens and what it holds."""

    def __init__(self, contents: Callable[[], Contents]) -> None:
        self._contents = contents
        self._reported: dict[str, int] = {}
        self._delivered: Counter[str] = Counter()
        self._tokens = Account()
        self._trajectories = Account()
        self._groups = Account()
        self._key_steps = Account()
        self._over_bound = 0
        self._evaluation: Counter[str] = Counter()
        self.kinds: dict[str, KindAccount] = {}

    # --- what workers say -------------------------------------------------------------------------------------------------

    def report_generated(self, worker: str, cumulative_tokens: int) -> None:
        """A worker's counter of action tokens drawn for training, discarded ones included. Call before adding what came with it."""
        before = self._reported.get(worker, 0)
        if cumulative_tokens < before:
            raise LedgerError(f"worker {worker} reported {before} generated tokens and now {cumulative_tokens}: its counter fell.")
        self._reported[worker] = cumulative_tokens
        self._tokens.generated += cumulative_tokens - before

    def worker_lost(self, worker: str) -> int:
        """What it drew and did not deliver becomes failed.worker_lost; returns that. A successor of its name counts from 0."""
        remainder = self._reported.get(worker, 0) - self._delivered[worker]
        if remainder < 0:
            raise LedgerError(f"the lost worker {worker} delivered {-remainder} tokens more than it had reported.")
        self._reported.pop(worker, None)
        del self._delivered[worker]
        self._tokens.book(RetireReason.FAILED, remainder, "worker_lost")
        return remainder

    def reported(self, worker: str) -> int:
        """What `report_generated` was told last."""
        return self._reported.get(worker, 0)

    @property
    def workers(self) -> tuple[str, ...]:
        """That have drawn or delivered anything and were not lost."""
        return tuple(sorted({*self._reported, *self._delivered}))

    def add_evaluation(self, summaries: Iterable[TrajectorySummary]) -> None:
        """Evaluation rollouts: shown beside the ledger, part of none of its sums."""
        for summary in summaries:
            self._evaluation["trajectories"] += 1
            self._evaluation["tokens"] += summary.num_action_tokens + summary.discarded_tokens

    # --- what the pool says -----------------------------------------------------------------------------------------------

    def reserved(self, kind: str, members: int) -> None:
        self._groups.generated += 1
        self._trajectories.generated += members
        self._kind(kind).offered += members

    def retried(self) -> None:
        self._trajectories.generated += 1

    def delivered(self, summary: TrajectorySummary, worker: str) -> None:
        """An attempt came back. Of a failed one everything is failed; of a good one what `abort` updates threw away."""
        self._delivered[worker] += summary.num_action_tokens + summary.discarded_tokens
        self._key_steps.generated += summary.num_key_steps
        if summary.failed:
            self._book_failure(summary, summary.num_action_tokens + summary.discarded_tokens)
        else:
            self._tokens.book(RetireReason.FAILED, summary.discarded_tokens, "aborted")

    def _book_failure(self, summary: TrajectorySummary, num_tokens: int) -> None:
        reason = str(summary.end_reason)
        self._tokens.book(RetireReason.FAILED, num_tokens, reason)
        self._trajectories.book(RetireReason.FAILED, 1, reason)
        self._key_steps.book(RetireReason.FAILED, summary.num_key_steps, reason)

    def sent_back(self, summary: TrajectorySummary, worker: str) -> None:
        """Its worker has it again, to verify it: its tokens are in flight."""
        self._delivered[worker] -= summary.num_action_tokens

    def restored(self, summary: TrajectorySummary, worker: str) -> None:
        """The worker was lost over it: what had been delivered stands."""
        self._delivered[worker] += summary.num_action_tokens

    def redelivered(self, summary: TrajectorySummary, before: TrajectorySummary, worker: str, *, key_steps: int, key_steps_before: int) -> None:
        """A verified trajectory came again, failed or not; `before` is how it was sent back. Key steps of members that are key as a whole
        are all their steps."""
        discarded = summary.discarded_tokens - before.discarded_tokens
        self._delivered[worker] += summary.num_action_tokens + discarded + summary.refreshed_tokens
        _add(self._tokens.skipped, "refreshed", summary.refreshed_tokens)
        _add(self._kind(summary.task_kind).skipped_tokens, "refreshed", summary.refreshed_tokens)
        self._key_steps.generated += key_steps + summary.refreshed_key_steps - key_steps_before
        _add(self._key_steps.skipped, "refreshed", summary.refreshed_key_steps)
        if summary.failed:
            self._book_failure(summary, summary.num_action_tokens + discarded)
        else:
            self._tokens.book(RetireReason.FAILED, discarded, "aborted")

    def rollout_lost(self, summary: TrajectorySummary) -> None:
        """An attempt died with the run; what was drawn for it is its worker's remainder (`worker_lost`)."""
        self._book_failure(summary, 0)

    def void(self, summary: TrajectorySummary, key_steps: int, *, for_good: bool) -> None:
        """A good trajectory of weights that a restore has undone; `for_good`: its member is not tried again."""
        self._tokens.void += summary.num_action_tokens
        self._trajectories.void += 1
        self._key_steps.void += key_steps
        if for_good:
            self._kind(summary.task_kind).retired[RetireReason.VOID] += 1

    def marked(self, num_steps: int) -> None:
        """So many more steps are key."""
        self._key_steps.generated += num_steps

    def member_failed(self, kind: str) -> None:
        """A member used up its attempts (the attempts themselves are booked when they come back)."""
        self._kind(kind).retired[RetireReason.FAILED] += 1

    def dropped(self, summary: TrajectorySummary, reason: RetireReason, key_steps: int) -> None:
        """A good trajectory left untrained: expired, filtered or void, as a whole."""
        self._tokens.book(reason, summary.num_action_tokens)
        self._trajectories.book(reason, 1)
        if reason is RetireReason.VOID:
            self._key_steps.book(reason, key_steps)
        else:  # key steps know no class of their own for these
            self._key_steps.book(RetireReason.SKIPPED, key_steps, str(reason))
        self._kind(summary.task_kind).retired[reason] += 1

    def learned(self, summary: TrajectorySummary, spent: Spent) -> None:
        """A good trajectory went through the learner."""
        kind = self._kind(summary.task_kind)
        self._tokens.trained += spent.trained_tokens
        kind.trained_tokens += spent.trained_tokens
        for reason, count in spent.skipped_tokens.items():
            _add(self._tokens.skipped, reason, count)
            _add(kind.skipped_tokens, reason, count)
        self._key_steps.trained += spent.trained_key_steps
        self._over_bound += spent.over_bound_key_steps
        for reason, count in spent.skipped_key_steps.items():
            _add(self._key_steps.skipped, reason, count)
        self._trajectories.book(spent.reason, 1, spent.main_skip_reason)
        kind.retired[spent.reason] += 1

    def group_retired(self, reason: RetireReason, detail: str = "") -> None:
        self._groups.book(reason, 1, detail)

    # --- over the life of a run ------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything but what the pool holds, as plain values; `restore` reads them."""
        return {
            **{name: account.state() for name, account in self._accounts().items()},
            "reported": dict(self._reported),
            "delivered": dict(self._delivered),
            "over_bound": self._over_bound,
            "evaluation": dict(self._evaluation),
            "kinds": {name: kind.state() for name, kind in self.kinds.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what an earlier process counted."""
        self._tokens, self._trajectories, self._groups, self._key_steps = (Account.restored(state[name]) for name in self._accounts())
        self._reported, self._delivered = dict(state["reported"]), Counter(state["delivered"])
        self._over_bound, self._evaluation = state["over_bound"], Counter(state["evaluation"])
        self.kinds = {name: KindAccount.restored(kind) for name, kind in state["kinds"].items()}

    def _accounts(self) -> dict[str, Account]:
        return {"tokens": self._tokens, "trajectories": self._trajectories, "groups": self._groups, "key_steps": self._key_steps}

    # --- what people read -------------------------------------------------------------------------------------------------

    def snapshot(self, *, at_update: int, lineage: int) -> dict[str, Any]:
        """The ledger record of CONTRACTS; `kinds` and `evaluation` beside it."""
        units = self._units()
        key_steps = units["key_steps"]
        return {
            "at_update": at_update,
            "lineage": lineage,
            "closes": not self._faults(units),
            "tokens": units["tokens"],
            "trajectories": units["trajectories"],
            "groups": units["groups"],
            "key_steps": {
                "offered": key_steps["generated"],
                "trained": key_steps["trained"],
                "over_bound": self._over_bound,
                **{name: key_steps[name] for name in ("skipped", "void", "pooled", "in_flight", "failed")},
            },
            "kinds": {
                name: {
                    "offered": kind.offered,
                    **{str(reason): kind.retired[reason] for reason in RetireReason},
                    "trained_tokens": kind.trained_tokens,
                    "skipped_tokens": dict(sorted(kind.skipped_tokens.items())),
                }
                for name, kind in sorted(self.kinds.items())
            },
            "evaluation": {name: self._evaluation[name] for name in ("tokens", "trajectories")},
        }

    def check(self) -> None:
        """Raises LedgerError naming the class and the difference."""
        faults = self._faults(self._units())
        if faults:
            raise LedgerError(f"the ledger does not close: {'; '.join(faults)}.")

    def _kind(self, name: str) -> KindAccount:
        return self.kinds.setdefault(name, KindAccount())

    def _units(self) -> dict[str, dict[str, Any]]:
        held = self._contents()
        return {
            "tokens": self._tokens.classes(held.tokens_pooled, sum(self._reported.values()) - self._delivered.total()),
            "trajectories": self._trajectories.classes(held.trajectories_pooled, held.trajectories_in_flight),
            "groups": self._groups.classes(held.groups_pooled, held.groups_in_flight),
            "key_steps": self._key_steps.classes(held.key_steps_pooled, held.key_steps_in_flight),
        }

    def _faults(self, units: Mapping[str, Mapping[str, Any]]) -> list[str]:
        faults = []
        for unit, classes in units.items():
            flat = _flatten(classes)
            faults += [f"{unit}: {name} is {count}" for name, count in flat.items() if count < 0]
            generated = flat.pop("generated")
            difference = generated - sum(flat.values())
            if difference:
                faults.append(f"{unit}: {generated} generated, the classes sum to {generated - difference} ({abs(difference)} {_lost(difference)})")
        if not units["trajectories"]["in_flight"] and units["tokens"]["in_flight"] > 0:
            faults.append(f"tokens: {units['tokens']['in_flight']} in_flight although no rollout is (lost on the way to the pool)")
        if "" not in self._delivered:  # every delivery names its worker
            for worker in sorted(self._delivered):
                surplus = self._delivered[worker] - self._reported.get(worker, 0)
                if surplus > 0:
                    faults.append(f"tokens: worker {worker} delivered {surplus} more than it reported")
        if self._over_bound > self._key_steps.trained:
            faults.append(f"key_steps: over_bound {self._over_bound} exceeds trained {self._key_steps.trained}")
        return faults


def _add(counter: Counter[str], reason: str, count: int) -> None:
    if count:
        counter[reason] += count


def _lost(difference: int) -> str:
    return "lost" if difference > 0 else "counted twice"


def _flatten(classes: Mapping[str, Any]) -> dict[str, int]:
    flat: dict[str, int] = {}
    for name, value in classes.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{reason}": count for reason, count in value.items()})
        else:
            flat[name] = value
    return flat
