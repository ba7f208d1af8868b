"""From what the learner says it did with a batch to what is booked for each member. Pure functions."""

from __future__ import annotations

from headrace.errors import InvariantError
from headrace.pool.ledger import Spent
from headrace.types import RolloutKey
from headrace.updates import MemberOutcome, SelectedMember, Selection, UpdateResult


def account(selection: Selection, result: UpdateResult | None) -> dict[RolloutKey, Spent]:
    """What became of each member's tokens and key steps. Raises InvariantError when the result leaves any of them open.

    A refused update that changed no weight trained nothing, whatever its outcomes say: those tokens are skipped.refused.
    """
    members = {member.summary.key: member for member in selection.members}
    if result is None:
        if members:
            raise InvariantError(f"selection {selection.id} holds {len(members)} members but retires without a result.")
        return {}
    if result.selection_id != selection.id:
        raise InvariantError(f"the result of selection {result.selection_id} came for selection {selection.id}.")
    outcomes = {outcome.key: outcome for outcome in result.outcomes}
    if len(outcomes) != len(result.outcomes):
        raise InvariantError(f"the result of selection {selection.id} names a member twice.")
    if foreign := outcomes.keys() - members.keys():
        raise InvariantError(f"the result of selection {selection.id} names {tuple(min(foreign))}, which it does not hold.")
    nothing_trained = result.refused is not None and result.version_after == result.version_before
    spent = {}
    for key, member in members.items():
        if nothing_trained:
            spent[key] = _refused(member, outcomes.get(key))
        elif key in outcomes:
            spent[key] = _trained(outcomes[key])
        else:
            raise InvariantError(f"the result of selection {selection.id} says nothing of {tuple(key)}.")
        _check(member, spent[key])
    return spent


def _trained(outcome: MemberOutcome) -> Spent:
    return Spent(
        trained_tokens=outcome.trained_tokens,
        skipped_tokens=outcome.skipped_tokens,
        trained_key_steps=outcome.trained_key_steps,
        over_bound_key_steps=outcome.over_bound_key_steps,
        skipped_key_steps=outcome.skipped_key_steps,
    )


def _refused(member: SelectedMember, outcome: MemberOutcome | None) -> Spent:
    """What was skipped for a reason of its own keeps it; everything else is skipped.refused."""
    tokens = dict(outcome.skipped_tokens) if outcome else {}
    steps = dict(outcome.skipped_key_steps) if outcome else {}
    refused_tokens = member.summary.num_action_tokens - sum(tokens.values())
    refused_steps = member.num_key_steps - sum(steps.values())
    return Spent(
        skipped_tokens={**tokens, "refused": tokens.get("refused", 0) + refused_tokens},
        skipped_key_steps={**steps, "refused": steps.get("refused", 0) + refused_steps},
    )


def _check(member: SelectedMember, spent: Spent) -> None:
    for unit, held, trained, skipped in (
        ("action tokens", member.summary.num_action_tokens, spent.trained_tokens, spent.skipped_tokens),
        ("key steps", member.num_key_steps, spent.trained_key_steps, spent.skipped_key_steps),
    ):
        if trained < 0 or any(count < 0 for count in skipped.values()) or trained + sum(skipped.values()) != held:
            raise InvariantError(f"{tuple(member.summary.key)} holds {held} {unit}, its outcome accounts for {trained} trained and {dict(skipped)} skipped.")
