"""LearnerRank: what counts as trained, what is refused, what a checkpoint keeps, what is published."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from fakes.learner_material import (
    QWEN2,
    VOCABULARY,
    action_logprobs,
    full_logprobs,
    make_selection,
    make_settings,
    make_trajectory,
    mixed_trajectories,
    save_model,
    with_logprobs,
)
from headrace.errors import CheckpointError, InvariantError, ModelError, StaleTokenError
from headrace.learner import batch as batch_module
from headrace.learner.core import LearnerRank, learning_rate
from headrace.learner.forward import SelectiveForward
from headrace.learner.guard import LEAST
from headrace.learner.state_memory import StateMemory
from headrace.manifest import write_manifest
from headrace.types import EndReason, PolicyVersion, RolloutKey
from headrace.updates import UpdateResult, WeightUpdate


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_model(tmp_path_factory.mktemp("model") / "qwen2")


def make_rank(
    path: Path, *, version: int = 0, dtype: torch.dtype = torch.float32, writer: Any = None, memory: Any = None, run: Any = None, **learner: Any
) -> LearnerRank:
    rank = LearnerRank(path, make_settings(learner=learner, run=run or {}), device="cpu", parameter_dtype=dtype, writer=writer, memory=memory)
    rank._version = rank._version._replace(number=version)
    return rank


def weights(rank: LearnerRank) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in rank.model.named_parameters()}


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def aged(spans_of_member: list[list[tuple[int, int, float]]]) -> list[Any]:
    """One group; each member one trajectory, each (version, tokens, key weight) a step."""
    generator = np.random.default_rng(1)
    return [
        make_trajectory(
            generator,
            group=0,
            member=member,
            reward=float(member),
            steps=[(2, length, [(version, length)], key) for version, length, key in steps],
        )
        for member, steps in enumerate(spans_of_member)
    ]


def by_member(result: UpdateResult) -> list[Any]:
    return list(result.outcomes)


# --- what is trained


def test_an_update_follows_torch_adamw_with_clipping_and_schedule(model_path: Path) -> None:
    trajectories = mixed_trajectories(2)
    settings = {"weight_decay": 0.1, "betas": (0.8, 0.9), "epsilon": 1e-6, "max_gradient_norm": 0.05, "schedule": "linear", "warmup_updates": 2}
    rank = make_rank(model_path, dtype=torch.float64, run={"num_updates": 6}, loss="reinforce", **settings)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for rate in (0.5e-3, 1e-3, 1e-3, 0.75e-3):
        statistics = rank.learn(make_selection(trajectories)).statistics
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for trajectory in trajectories:
            rewards = np.array([other.reward for other in trajectories if other.key.group_id == trajectory.key.group_id])
            loss = loss - (trajectory.reward - rewards.mean()) / (rewards.std() + 1e-6) * action_logprobs(model, trajectory).sum()
        (loss / sum(t.num_action_tokens for t in trajectories)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        assert statistics is not None
        assert (statistics.learning_rate, statistics.gradient_norm) == pytest.approx((rate, norm.item()))
    assert all(torch.allclose(p, dict(rank.model.named_parameters())[name], atol=1e-10) for name, p in model.named_parameters())


def test_schedules_reach_zero_after_the_last_update() -> None:
    for schedule, half in (("linear", 0.5), ("cosine", 0.5), ("constant", 1.0)):
        settings = make_settings(learner={"schedule": schedule, "warmup_updates": 4}, run={"num_updates": 24})
        rates = [learning_rate(settings, number) / 1e-3 for number in range(26)]
        assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
        assert rates[14] == pytest.approx(half)
        assert 0 < rates[23] <= 1
        assert rates[24] == pytest.approx(0.0 if schedule != "constant" else 1.0)


def test_unmarked_tokens_over_the_bound_are_skipped_and_key_steps_are_not(model_path: Path) -> None:
    rank = make_rank(model_path, version=10)
    trajectories = aged([[(2, 3, 0.0), (9, 2, 0.0)], [(1, 4, 1.0), (8, 3, 1.0), (3, 2, 0.0)], [(1, 5, 0.0)]])
    result = rank.learn(make_selection(trajectories, version=10, max_staleness=4, max_key_staleness=2))
    first, second, third = by_member(result)
    assert (first.trained_tokens, dict(first.skipped_tokens)) == (2, {"stale": 3})
    assert (second.trained_tokens, dict(second.skipped_tokens)) == (7, {"stale": 2})
    assert (second.trained_key_steps, second.over_bound_key_steps, dict(second.skipped_key_steps)) == (2, 1, {})
    assert (third.trained_tokens, dict(third.skipped_tokens)) == (0, {"stale": 5})
    s = result.statistics
    assert s is not None
    assert dict(s.staleness_histogram) == {1: 2, 2: 3, 9: 4}
    assert (s.staleness_mean, s.staleness_max) == (pytest.approx((2 + 6 + 36) / 9), 9)
    assert (s.key_staleness_mean, s.key_staleness_max) == (pytest.approx((6 + 36) / 7), 9)
    assert dict(s.key_staleness_histogram) == {2: 3, 9: 4}
    assert (s.trained_tokens, s.trained_trajectories) == (9, 2)


def test_skipped_tokens_still_count_in_the_groups_baseline(model_path: Path) -> None:
    fresh, stale = aged([[(5, 4, 0.0)], [(0, 4, 0.0)]])
    rank = make_rank(model_path, version=5, dtype=torch.float64, max_gradient_norm=1e9, loss="reinforce", advantage="mean")
    rank.learn(make_selection([fresh, stale], version=5, max_staleness=2))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64).eval()
    (0.5 * action_logprobs(model, fresh).mean()).backward()  # rewards 0 and 1: advantage -0.5
    for name, parameter in model.named_parameters():
        assert torch.allclose(dict(rank.model.named_parameters())[name].grad, parameter.grad, atol=1e-9)


def test_staleness_is_that_of_the_learner_now_and_grows_with_every_minibatch(model_path: Path) -> None:
    generator = np.random.default_rng(0)
    groups = [
        make_trajectory(generator, group=group, member=member, reward=float(member), steps=[(2, 3, [(4, 3)], 0.0)]) for group in range(3) for member in range(2)
    ]
    rank = make_rank(model_path, version=6, num_minibatches=3)
    result = rank.learn(make_selection(groups, version=5, max_staleness=3))  # taken at 5, learned from at 6, 7 and 8
    assert (result.version_before.number, result.version_after.number) == (6, 8)
    assert [outcome.trained_tokens for outcome in result.outcomes] == [3, 3, 3, 3, 0, 0]
    assert [dict(outcome.skipped_tokens) for outcome in result.outcomes[4:]] == [{"stale": 3}] * 2
    assert result.statistics is not None and dict(result.statistics.staleness_histogram) == {2: 6, 3: 6}


def test_tokens_count_once_however_many_epochs(model_path: Path) -> None:
    trajectories = mixed_trajectories(4)
    rank = make_rank(model_path, num_epochs=3, num_minibatches=2)
    result = rank.learn(make_selection(trajectories))
    assert result.version_after == rank.version == PolicyVersion(0, 6)
    assert [outcome.trained_tokens for outcome in result.outcomes] == [t.num_action_tokens for t in trajectories]
    assert result.statistics is not None and result.statistics.trained_tokens == sum(t.num_action_tokens for t in trajectories)
    halves = [sum(t.num_action_tokens for t in trajectories if (t.key.group_id < 2) == first) for first in (True, False)]
    assert dict(result.statistics.staleness_histogram) == {0: halves[0], 1: halves[1]}  # as old as when first trained
    assert 0 < result.busy_seconds <= result.seconds


def test_filtered_members_are_not_trained_and_have_no_outcome(model_path: Path) -> None:
    trajectories = mixed_trajectories(4)
    filtered = tuple(t.key for t in trajectories if t.key.group_id == 1)
    with_members = make_rank(model_path)
    result = with_members.learn(make_selection(trajectories, filtered=filtered))
    assert [outcome.key for outcome in result.outcomes] == [t.key for t in trajectories if t.key.group_id != 1]
    without = make_rank(model_path)
    without.learn(make_selection([t for t in trajectories if t.key.group_id != 1], filtered=filtered))
    assert same(weights(with_members), weights(without))


@pytest.mark.parametrize("payloads", [[], [[(0, 4, 0.0)], [(0, 3, 0.0)]]])
def test_a_selection_without_a_trained_token_makes_no_update(model_path: Path, payloads: Any) -> None:
    rank = make_rank(model_path, version=9)
    before = weights(rank)
    result = rank.learn(make_selection(aged(payloads), version=9, max_staleness=2))
    assert (result.statistics, result.refused, result.version_after) == (None, None, PolicyVersion(0, 9))
    assert same(before, weights(rank))


def test_masked_tokens_are_skipped_and_key_steps_go_through_ppo_clip_instead(model_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    trajectories = []
    for trajectory in aged([[(0, 4, 0.0), (0, 2, 1.0)], [(0, 3, 0.0)]]):
        exact = action_logprobs(model, trajectory).detach().numpy()
        shift = np.zeros(len(exact))
        shift[[0, -1]] = 3.0  # the sampler found them e^3 times less likely: ratio 20, over the cap
        trajectories.append(with_logprobs(trajectory, exact - shift))
    rank = make_rank(model_path, loss="reinforce", correction="masked", ratio_cap=2.0)
    result = rank.learn(make_selection(trajectories))
    first, second = by_member(result)
    assert (first.trained_tokens, dict(first.skipped_tokens), first.trained_key_steps) == (5, {"masked": 1}, 1)
    assert (second.trained_tokens, dict(second.skipped_tokens)) == (1, {"masked": 2})
    s = result.statistics
    assert s is not None
    assert s.masked_fraction == pytest.approx(3 / 9)
    assert s.clipped_fraction == 0.0  # the rescued key token has A < 0: PPO-clip leaves its ratio of 20 alone
    assert sum(s.staleness_histogram.values()) == s.trained_tokens == 6


def test_statistics_are_those_of_plain_numpy(model_path: Path) -> None:
    trajectories = mixed_trajectories(7, temperature=1.3)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64).eval()
    rank = make_rank(model_path, dtype=torch.float64, kl_coefficient=0.2, micro_batch_tokens=60)
    s = rank.learn(make_selection(trajectories)).statistics
    with torch.no_grad():
        learner = np.concatenate([action_logprobs(model, t).numpy() for t in trajectories])
        tables = [full_logprobs(model, t) for t in trajectories]
    sampler = np.concatenate([t.sampler_logprobs for t in trajectories])
    entropies = [
        float(-(table[p - 1].exp() * table[p - 1]).sum())
        for t, table in zip(trajectories, tables, strict=True)
        for step in t.steps
        for p in range(step.action_start, step.action_end)
    ]
    ratios = np.exp(learner - sampler)
    assert s is not None
    assert s.entropy == pytest.approx(np.mean(entropies))
    assert s.kl_sampler_learner == pytest.approx((sampler - learner).mean())
    assert (s.ratio_mean, s.ratio_variance) == pytest.approx((ratios.mean(), ratios.var()))
    assert s.ratio_max == pytest.approx(ratios.max())
    assert s.effective_sample_size == pytest.approx(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()))
    advantages = np.concatenate(
        [np.full(t.num_action_tokens, t.reward - np.mean([o.reward for o in trajectories if o.key.group_id == t.key.group_id])) for t in trajectories]
    )
    clipped = ((advantages > 0) & (ratios > 1.28)) | ((advantages < 0) & (ratios < 0.8))
    assert s.clipped_fraction == pytest.approx(clipped.mean())
    assert s.reference_kl == pytest.approx(0.0, abs=1e-12)
    assert s.padded_tokens >= sum(len(t.tokens) for t in trajectories) - len(trajectories) * 2


def test_rows_end_after_their_last_trained_token(model_path: Path) -> None:
    generator = np.random.default_rng(0)
    stale_tail = [make_trajectory(generator, group=0, member=m, reward=m, steps=[(3, 4, [(9, 4)], 0.0), (2, 20, [(9, 20)], 0.0)]) for m in range(2)]
    whole = make_rank(model_path, version=9).learn(make_selection(stale_tail, version=9, max_staleness=0)).statistics
    generator = np.random.default_rng(0)
    cut_tail = [make_trajectory(generator, group=0, member=m, reward=m, steps=[(3, 4, [(9, 4)], 1.0), (2, 20, [(9, 20)], 0.0)]) for m in range(2)]
    cut = make_rank(model_path, version=10).learn(make_selection(cut_tail, version=10, max_staleness=0)).statistics
    assert whole is not None and cut is not None
    assert (whole.padded_tokens, cut.padded_tokens) == (2 * 28, 2 * 6)  # the last trained token itself is not an input


def test_decoupled_ppo_keeps_the_weights_before_the_first_update_as_its_proximal_policy(model_path: Path) -> None:
    trajectories = mixed_trajectories(6, groups=1)
    options: dict[str, Any] = {"loss": "decoupled_ppo", "correction": "decoupled", "max_gradient_norm": 1e9, "learning_rate": 0.03}
    rank = make_rank(model_path, dtype=torch.float64, num_epochs=2, **options)
    once = make_rank(model_path, dtype=torch.float64, **options)
    rank.learn(make_selection(trajectories))
    once.learn(make_selection(trajectories))
    proximal = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64).eval()
    model = once.model
    for parameter in model.parameters():
        parameter.grad = None
    rewards = np.array([t.reward for t in trajectories])
    loss, clipped = torch.zeros((), dtype=torch.float64), 0
    for t in trajectories:
        advantage = (t.reward - rewards.mean()) / (rewards.std() + 1e-6)
        start = action_logprobs(proximal, t).detach()
        ratio = torch.exp(action_logprobs(model, t) - start)
        weight = torch.exp(start - torch.tensor(t.sampler_logprobs, dtype=torch.float64))
        loss = loss - (weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)).sum()
        clipped += int((ratio.clamp(0.8, 1.28) != ratio).sum())
    (loss / sum(t.num_action_tokens for t in trajectories)).backward()
    assert clipped  # the second update has moved away from the proximal policy
    for name, parameter in model.named_parameters():
        assert torch.allclose(dict(rank.model.named_parameters())[name].grad, parameter.grad, rtol=1e-6, atol=1e-9)


# --- what must never arrive


def test_an_unmarked_token_over_the_bound_with_weight_is_refused(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = batch_module.weigh

    def broken(batch: Any, number: int) -> Any:
        weighing = real(batch, number)
        return replace(weighing, trained_A=np.ones_like(weighing.trained_A))

    monkeypatch.setattr("headrace.learner.core.weigh", broken)
    rank = make_rank(model_path, version=9)
    before = weights(rank)
    with pytest.raises(StaleTokenError, match=r"group 0 .* version 3, the learner is at 9 \(6 > max_staleness 4\)"):
        rank.learn(make_selection(aged([[(3, 4, 0.0)], [(9, 4, 0.0)]]), version=9, max_staleness=4))
    assert same(before, weights(rank)) and rank.version.number == 9


def test_a_key_token_over_its_bound_must_go_through_ppo_clip(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = batch_module.weigh
    monkeypatch.setattr("headrace.learner.core.weigh", lambda batch, number: replace(real(batch, number), over_bound_A=np.zeros(8, dtype=bool)))
    with pytest.raises(StaleTokenError, match="PPO-clip"):
        make_rank(model_path, version=9).learn(make_selection(aged([[(3, 4, 1.0)], [(9, 4, 0.0)]]), version=9))


def test_versions_the_learner_does_not_descend_from_are_refused(model_path: Path) -> None:
    rank = make_rank(model_path, version=3)
    with pytest.raises(InvariantError, match="newer than the learner"):
        rank.learn(make_selection(aged([[(4, 4, 0.0)], [(3, 4, 0.0)]]), version=3))
    generator = np.random.default_rng(0)
    foreign = [make_trajectory(generator, group=0, member=m, reward=m, lineage=1, steps=[(2, 3, [(2, 3)], 0.0)]) for m in range(2)]
    with pytest.raises(InvariantError, match="another lineage"):
        rank.learn(make_selection(foreign, version=3))


def test_after_a_restore_only_what_the_restored_weights_descend_from_is_trained(model_path: Path, tmp_path: Path) -> None:
    rank = make_rank(model_path, version=5)
    rank.save(tmp_path / "five")
    rank.load(tmp_path / "five")
    assert rank.version == PolicyVersion(1, 5)
    assert rank.learn(make_selection(aged([[(5, 3, 0.0)], [(2, 3, 0.0)]]))).version_after == PolicyVersion(1, 6)
    with pytest.raises(InvariantError, match="a restore has undone"):
        rank.learn(make_selection(aged([[(6, 3, 0.0)], [(2, 3, 0.0)]])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"end_reason": EndReason.ENVIRONMENT_ERROR}, "failed rollout"),
        ({"reward": math.nan}, "reward nan"),
        ({"temperature": 0.0}, "temperature 0"),
    ],
)
def test_trajectories_that_cannot_be_trained_are_named(model_path: Path, change: dict[str, Any], message: str) -> None:
    first, second = aged([[(0, 3, 0.0)], [(0, 3, 0.0)]])
    with pytest.raises(InvariantError, match=message):
        make_rank(model_path).learn(make_selection([first, replace(second, **change)]))


def test_a_payload_of_another_member_is_refused(model_path: Path) -> None:
    selection = make_selection(aged([[(0, 3, 0.0)], [(0, 3, 0.0)]]))
    first, second = selection.members
    swapped = replace(selection, members=(first, replace(second, payload=first.payload)))
    with pytest.raises(InvariantError, match=r"payload of \(0, 1, 0\)"):
        make_rank(model_path).learn(swapped)


# --- refused updates


def test_a_non_finite_gradient_changes_nothing_and_the_next_update_goes_on(model_path: Path) -> None:
    trajectories = mixed_trajectories(4)
    rank, untouched = make_rank(model_path), make_rank(model_path)
    rank.learn(make_selection(trajectories))
    untouched.learn(make_selection(trajectories))
    before = weights(rank)
    parameter = next(rank.model.parameters())
    hook = parameter.register_hook(lambda gradient: gradient * math.nan)
    result = rank.learn(make_selection(trajectories, version=1))
    hook.remove()
    assert result.refused is not None and "not finite" in result.refused
    assert (result.version_before, result.version_after, rank.version) == (PolicyVersion(0, 1),) * 3
    assert result.statistics is None
    assert all(outcome.trained_tokens == 0 for outcome in result.outcomes)
    assert [dict(outcome.skipped_tokens) for outcome in result.outcomes] == [{"refused": t.num_action_tokens} for t in trajectories]
    assert same(before, weights(rank))
    rank.learn(make_selection(trajectories, version=1))
    untouched.learn(make_selection(trajectories, version=1))
    assert same(weights(rank), weights(untouched))  # so the optimizer had not moved either


def test_an_exploding_gradient_changes_nothing_although_it_would_have_been_scaled_down(model_path: Path) -> None:
    trajectories = mixed_trajectories(4)
    rank = make_rank(model_path, learning_rate=1e-6)
    for number in range(LEAST):
        assert rank.learn(make_selection(trajectories, version=number, max_staleness=LEAST)).refused is None
    before = weights(rank)
    hooks = [parameter.register_hook(lambda gradient: gradient * 1e6) for parameter in rank.model.parameters()]
    result = rank.learn(make_selection(trajectories, version=LEAST, max_staleness=LEAST))
    for hook in hooks:
        hook.remove()
    assert result.refused is not None and "the gradient explodes" in result.refused and result.statistics is None
    assert rank.version == PolicyVersion(0, LEAST) and same(before, weights(rank))
    assert rank.learn(make_selection(trajectories, version=LEAST, max_staleness=LEAST)).refused is None


def test_data_that_the_policy_has_left_behind_is_refused_before_the_step(model_path: Path) -> None:
    trajectories = mixed_trajectories(4)
    usual = [with_logprobs(one, [-math.log(VOCABULARY)] * one.num_action_tokens) for one in trajectories]  # about what a model from scratch gives
    far = [with_logprobs(one, [0.0] * one.num_action_tokens) for one in trajectories]
    for factor, refuses in ((300.0, True), (0.0, False)):
        rank = LearnerRank(model_path, make_settings(learner={"learning_rate": 1e-6}, governor={"explosion_factor": factor}), device="cpu")
        for number in range(LEAST):
            assert rank.learn(make_selection(usual, version=number, max_staleness=LEAST)).refused is None
        before = weights(rank)
        result = rank.learn(make_selection(far, version=LEAST, max_staleness=LEAST))
        assert (result.refused is not None and "moved away from its data (KL(sampler || learner)" in result.refused) is refuses
        assert same(before, weights(rank)) is refuses


def test_one_refused_minibatch_leaves_the_others(model_path: Path) -> None:
    trajectories = mixed_trajectories(4, groups=2, keys=True)
    rank = make_rank(model_path, num_minibatches=2)
    calls = []
    parameter = next(rank.model.parameters())
    parameter.register_hook(lambda gradient: gradient * math.nan if not calls and calls.append(1) is None else gradient)
    result = rank.learn(make_selection(trajectories))
    assert result.refused is not None and result.version_after == PolicyVersion(0, 1)
    refused = [outcome for outcome in result.outcomes if outcome.key.group_id == 0]
    assert all(set(outcome.skipped_tokens) == {"refused"} and dict(outcome.skipped_key_steps) == {"refused": 1} for outcome in refused)
    assert all(outcome.trained_tokens and not outcome.skipped_tokens for outcome in result.outcomes if outcome.key.group_id == 1)


# --- checkpoints


def save_with_tokenizer(path: Path, target: Path) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    model = AutoModelForCausalLM.from_pretrained(path)
    model.save_pretrained(target)
    backend = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w1").save_pretrained(target)
    return target


def test_a_checkpoint_is_a_hugging_face_directory_with_the_same_logits(model_path: Path, tmp_path: Path) -> None:
    path = save_with_tokenizer(model_path, tmp_path / "model")
    rank = make_rank(path)
    rank.learn(make_selection(mixed_trajectories(4)))
    rank.save(tmp_path / "runs" / "update_000001")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "update_000001").eval()
    tokens = torch.arange(12)[None] % VOCABULARY
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, rank.model(input_ids=tokens).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "runs" / "update_000001").eos_token_id == 1
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["update_000001"]
    facts = json.loads((tmp_path / "runs" / "update_000001" / "learner.json").read_text())
    assert facts["version"] == [0, 1] and facts["settings"]["learner"]["learning_rate"] == 1e-3
    assert not list((tmp_path / "runs").rglob("*.bin")) + list((tmp_path / "runs").rglob("*.pt"))


def test_the_update_after_a_restore_is_exactly_the_one_that_would_have_been(model_path: Path, tmp_path: Path) -> None:
    rank = make_rank(model_path, run={"num_updates": 9}, schedule="cosine", weight_decay=0.1)
    for seed in (1, 2):
        rank.learn(make_selection(mixed_trajectories(seed)))
    rank.save(tmp_path / "two")
    on, restored = rank.learn(make_selection(mixed_trajectories(3))), make_rank(model_path, run={"num_updates": 9}, schedule="cosine", weight_decay=0.1)
    restored.load(tmp_path / "two")
    assert restored.version == PolicyVersion(1, 2)
    again = restored.learn(make_selection(mixed_trajectories(3)))
    assert same(weights(rank), weights(restored))
    assert again.statistics == on.statistics


def test_the_update_after_a_copy_in_memory_is_exactly_the_one_that_would_have_been(model_path: Path) -> None:
    memory = StateMemory()
    options: dict[str, Any] = {"run": {"num_updates": 9}, "schedule": "cosine", "weight_decay": 0.1, "memory": memory}
    rank, successor = make_rank(model_path, **options), make_rank(model_path, **options)
    for seed in (1, 2):
        rank.learn(make_selection(mixed_trajectories(seed)))
        assert rank.copy() > sum(parameter.nbytes for parameter in rank.model.parameters())
    on = rank.learn(make_selection(mixed_trajectories(3)))
    successor.load_copy(PolicyVersion(0, 2), lineage=4)
    assert successor.version == PolicyVersion(4, 2) and successor._guard.state()["kls"] == rank._guard.state()["kls"][:2]
    again = successor.learn(make_selection(mixed_trajectories(3)))
    assert same(weights(rank), weights(successor))
    assert again.statistics == on.statistics


def test_a_failed_save_leaves_the_old_checkpoint_whole(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = make_rank(model_path)
    rank.save(tmp_path / "c")
    rank.learn(make_selection(mixed_trajectories(4)))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("headrace.learner.checkpoints.save_file", full)
        with pytest.raises(CheckpointError, match="No space left"):
            rank.save(tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    other = make_rank(model_path)
    other.load(tmp_path / "c")
    assert other.version == PolicyVersion(1, 0) and same(weights(other), weights(make_rank(model_path)))
    rank.save(tmp_path / "c")  # replaces it
    other.load(tmp_path / "c")
    assert other.version == PolicyVersion(1, 1) and same(weights(other), weights(rank))


@pytest.mark.parametrize("damage", ["learner.json", "optimizer.safetensors", "model.safetensors"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(model_path: Path, tmp_path: Path, damage: str) -> None:
    rank = make_rank(model_path)
    rank.learn(make_selection(mixed_trajectories(4)))
    rank.save(tmp_path / "c")
    (tmp_path / "c" / damage).write_bytes(b"{}")
    other = make_rank(model_path)
    before = weights(other)
    with pytest.raises(CheckpointError, match="not a whole learner checkpoint"):
        other.load(tmp_path / "c")
    assert same(before, weights(other)) and other.version == PolicyVersion(0, 0)


def test_what_the_guard_of_updates_knows_is_in_the_checkpoint(model_path: Path, tmp_path: Path) -> None:
    before, loaded = make_rank(model_path), make_rank(model_path)
    for _ in range(2):
        before.learn(make_selection(mixed_trajectories(4)))
    before.save(tmp_path / "c")
    loaded.load(tmp_path / "c")
    assert len(before._guard.state()["log_norms"]) == 2 and loaded._guard.state() == before._guard.state()
    facts = json.loads((tmp_path / "c/learner.json").read_text())
    del facts["guard"]  # of a headrace that kept nothing of it
    (tmp_path / "c/learner.json").write_text(json.dumps(facts))
    (tmp_path / "c/manifest.json").unlink()
    write_manifest(tmp_path / "c")
    loaded.load(tmp_path / "c")
    assert loaded._guard.state() == {"log_norms": [], "kls": []}


def test_what_rollbacks_made_of_the_learning_rate_is_in_the_checkpoint(model_path: Path, tmp_path: Path) -> None:
    plain, slower = make_rank(model_path), make_rank(model_path)
    slower.learning_rate_factor = 0.25
    slower.save(tmp_path / "c")
    loaded = make_rank(model_path)
    loaded.load(tmp_path / "c")
    rates = [rank.learn(make_selection(mixed_trajectories(4))).statistics.learning_rate for rank in (plain, slower)]  # type: ignore[union-attr]
    assert rates[1] == 0.25 * rates[0] and loaded.learning_rate_factor == 0.25
    facts = json.loads((tmp_path / "c/learner.json").read_text())
    del facts["learning_rate_factor"]  # of a headrace that knew none
    (tmp_path / "c/learner.json").write_text(json.dumps(facts))
    (tmp_path / "c/manifest.json").unlink()
    write_manifest(tmp_path / "c")
    loaded.load(tmp_path / "c")
    assert loaded.learning_rate_factor == 1.0


def test_a_checkpoint_of_another_model_is_refused(model_path: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", {**QWEN2, "hidden_size": 32})
    make_rank(other).save(tmp_path / "c")
    with pytest.raises(CheckpointError, match="another model"):
        make_rank(model_path).load(tmp_path / "c")


def test_a_missing_model_is_named() -> None:
    with pytest.raises(ModelError, match="/nowhere/at/all"):
        make_rank(Path("/nowhere/at/all"))


# --- publishing


class KeepingWriter:
    def __init__(self) -> None:
        self.published: list[tuple[PolicyVersion, dict[str, torch.Tensor]]] = []

    def publish(self, parameters: Mapping[str, torch.Tensor], version: PolicyVersion) -> WeightUpdate:
        self.published.append((version, {name: value.clone() for name, value in parameters.items()}))
        return WeightUpdate(version=version, num_bytes=0, publish_seconds=0.0)


def test_publish_gives_every_parameter_under_the_version_it_has(model_path: Path) -> None:
    writer = KeepingWriter()
    rank = make_rank(model_path, writer=writer)
    assert rank.publish().version == PolicyVersion(0, 0)
    rank.learn(make_selection(mixed_trajectories(4)))
    assert rank.publish().version == PolicyVersion(0, 1)
    (_, first), (version, second) = writer.published
    assert version == PolicyVersion(0, 1) and same(second, weights(rank)) and not same(first, second)
    assert not any(value.requires_grad for value in second.values())
    with pytest.raises(InvariantError, match="no weight writer"):
        make_rank(model_path).publish()


def test_low_precision_keeps_float32_weights_and_publishes_the_dtype(model_path: Path) -> None:
    writer = KeepingWriter()
    settings = make_settings(model={"dtype": "bfloat16"})
    rank = LearnerRank(model_path, settings, device="cpu", writer=writer)
    result = rank.learn(make_selection(mixed_trajectories(4)))
    rank.publish()
    assert result.refused is None and rank.version == PolicyVersion(0, 1)
    assert {value.dtype for value in writer.published[0][1].values()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in rank.model.parameters()} == {torch.float32}


# --- logits where they are needed

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": QWEN2,
    "llama": {**QWEN2, "model_type": "llama"},
    "gpt2": {"model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "gemma2": {**QWEN2, "model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 2.0},  # tanh after the head
    "cohere": {**QWEN2, "model_type": "cohere", "logit_scale": 0.25},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_chosen_logits_are_those_of_the_whole_forward(name: str) -> None:
    keys = dict(ARCHITECTURES[name])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys)).double().eval()
    tokens = torch.randint(0, VOCABULARY, (3, 9))
    full = model(input_ids=tokens).logits.flatten(0, 1).detach()
    forward = SelectiveForward(model)
    chosen = torch.tensor([0, 5, 8, 13, 26])
    assert forward._selects
    assert torch.allclose(forward.logits(tokens, chosen), full[chosen], atol=1e-12)
    assert torch.allclose(model(input_ids=tokens).logits.flatten(0, 1), full)  # other callers still get all of them
    forward._selects = False
    assert torch.allclose(forward.logits(tokens, chosen), full[chosen], atol=1e-12)


def test_dropout_is_off_even_for_a_model_in_training_mode() -> None:
    keys = {**ARCHITECTURES["gpt2"], "resid_pdrop": 0.9, "embd_pdrop": 0.9, "attn_pdrop": 0.9}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys)).train()
    forward = SelectiveForward(model)
    tokens, chosen = torch.arange(8)[None], torch.tensor([2, 7])
    assert torch.equal(forward.logits(tokens, chosen), forward.logits(tokens, chosen))


def test_outcomes_name_members_by_key(model_path: Path) -> None:
    result = make_rank(model_path).learn(make_selection(mixed_trajectories(4, groups=1, size=2)))
    assert [outcome.key for outcome in result.outcomes] == [RolloutKey(0, 0, 0), RolloutKey(0, 1, 0)]
