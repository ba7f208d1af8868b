"""Settings: what exists, its unit, its range, its default. Loading a recipe file into them is config_loading.py.

Every field has a description (the documentation is generated from it). Ranges stand in the field; rules between fields stand
in `Settings.check_rules`, which reports all of them at once.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace.marks import RuleError, parse_rule


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class Mode(StrEnum):
    SYNC = "sync"
    ASYNC = "async"


class Placement(StrEnum):
    SPLIT = "split"
    COLOCATED = "colocated"


class SelectionRule(StrEnum):
    OLDEST_FIRST = "oldest_first"
    READY_FIRST = "ready_first"


class OnExpiry(StrEnum):
    SKIP_TOKENS = "skip_tokens"
    DROP_GROUP = "drop_group"
    WAIT = "wait"


class NoSignal(StrEnum):
    FILTER = "filter"
    REFILL = "refill"
    TRAIN = "train"


class UpdateMode(StrEnum):
    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class Apply(StrEnum):
    EVERY_STEP = "every_step"
    KEY_STEPS = "key_steps"
    ROLLOUT_START = "rollout_start"


class Verify(StrEnum):
    OFF = "off"
    KEY_STEPS = "key_steps"
    ALL = "all"


class CutRule(StrEnum):
    ACCEPT = "accept"
    RANDOM_CUTS = "random_cuts"


class ContextRule(StrEnum):
    TRAJECTORY = "trajectory"
    OBSERVATION = "observation"


class RecordTrajectories(StrEnum):
    ALL = "all"
    TRAINED = "trained"
    NONE = "none"


class Loss(StrEnum):
    REINFORCE = "reinforce"
    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"
    PPO_CLIP = "ppo_clip"
    GSPO = "gspo"
    CISPO = "cispo"
    TOPR = "topr"
    DECOUPLED_PPO = "decoupled_ppo"


class Correction(StrEnum):
    NONE = "none"
    TRUNCATED = "truncated"
    MASKED = "masked"
    SEQUENCE_MASKED = "sequence_masked"
    DECOUPLED = "decoupled"


class RatioLevel(StrEnum):
    TOKEN = "token"
    SEQUENCE = "sequence"


class Advantage(StrEnum):
    MEAN_STD = "mean_std"
    MEAN = "mean"
    LEAVE_ONE_OUT = "leave_one_out"
    NONE = "none"


class LossScale(StrEnum):
    TOKEN = "token"
    SEQUENCE = "sequence"
    CONSTANT = "constant"


class OnFailure(StrEnum):
    STOP = "stop"
    SKIP = "skip"
    ROLL_BACK = "roll_back"


class RunSettings(Section):
    name: str = Field("run", description="Name of the run; the run directory is runs/NAME-TIME.", min_length=1)
    mode: Mode = Field(Mode.ASYNC, description="sync: sample a batch with the newest weights, learn, repeat. async: samplers and learner run at once.")
    placement: Placement = Field(
        Placement.SPLIT, description="split: samplers and learner ranks have devices of their own. colocated (sync only): every device samples, then learns."
    )
    seed: int = Field(0, description="Seed of tasks, sampling and initial weights.", ge=0)
    num_updates: int = Field(100, description="Updates to make: optimizer steps.", ge=1)
    num_samplers: int = Field(1, description="Rollout workers, each with one sampler on one device.", ge=1, le=4096)
    num_learner_ranks: int = Field(1, description="Data-parallel learner ranks, each on one device.", ge=1, le=4096)
    pin_devices: bool = Field(True, description="On CPU: pin each device's processes to one core.")
    record_trajectories: RecordTrajectories = Field(
        RecordTrajectories.TRAINED,
        description="What goes to trajectories/*.parquet, for people: trained (what the learner got), all (filtered, expired and failed ones too), none.",
    )
    record_fraction: float = Field(1.0, description="Share of the groups that are recorded, spread evenly over the run.", gt=0, le=1)
    max_failed_rollouts_in_a_row: int = Field(64, description="Failed rollouts, with no success between them, that end the run.", ge=1)
    max_empty_batches: int = Field(20, description="Batches in a row without any signal that end the run.", ge=1)


class ModelSettings(Section):
    path: str | None = Field(None, description="Hugging Face directory or hub name; none: built from `architecture` with random weights.")
    architecture: dict[str, Any] | None = Field(
        None, description="Keys of a Hugging Face config, with model_type, for a model from scratch. vocab_size and special tokens come from the tokenizer."
    )
    characters: str | None = Field(None, description="Alphabet of a character tokenizer for a model from scratch; none: the tokenizer of `path`.")
    device: str = Field("cpu", description="torch device of samplers and learner: cpu, cuda, cuda:0.")
    sampler_device: str | None = Field(None, description="Overrides `device` for samplers.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Of the weights, on both sides. bfloat16 is slow on most CPUs.")
    prepare: str | None = Field(
        None, description="`task:function(cache)` that makes or finds the model and returns its directory; `cache` is a folder that stays. Instead of `path`."
    )
    lora_rank: int = Field(0, description="Rank of LoRA adapters: only they are trained and sent to samplers. 0: every weight is trained.", ge=0, le=1024)
    lora_alpha: int = Field(16, description="Adapters are scaled by lora_alpha / lora_rank.", ge=1)
    lora_targets: list[str] = Field(
        default_factory=list, description="Linear layers that get adapters, by the end of their name (q_proj, v_proj); none: all but the output layer."
    )


class WarmStartSettings(Section):
    demonstrations: str | None = Field(None, description="`task:function` that yields (prompt, answer, prompt, answer, ...) text tuples; none: no warm start.")
    num_updates: int = Field(0, description="Supervised updates before RL.", ge=0)
    batch_size: int = Field(64, description="Demonstrations an update.", ge=1)
    learning_rate: float = Field(3e-3, description="Of AdamW, cosine to 0.", gt=0)
    seed: int = Field(0, description="Seed of weights and demonstrations.", ge=0)


class TaskSettings(Section):
    module: str = Field("task.py", description="The recipe's Python file, relative to the recipe; it is imported: your own code.")
    source: str | None = Field(
        None,
        description="Tasks: a JSONL or Parquet file (a line or row each: id, data or its keys, kind), a Hugging Face dataset `hf:NAME[:SPLIT]` or "
        "`hf:NAME:CONFIGURATION:SPLIT`, or `task:function`, an iterable of tasks.",
    )
    environment: str | None = Field(None, description="`task:Class` or `task:function` that makes an environment; none: one-step tasks with `prompt`.")
    reward: str | None = Field(None, description="`task:function(task, answer) -> float`, of one-step tasks or added to the environment's rewards at the end.")
    evaluation_source: str | None = Field(
        None, description="Tasks of evaluations, like `source`; none: the first `evaluation.num_tasks` of `source`, set apart."
    )
    evaluate: str | None = Field(None, description="`task:function(policy, tasks)`, async, returns {name: value}; beside sampled evaluation rollouts.")
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of source, environment and demonstrations functions that name them.")
    shuffle: bool = Field(True, description="Shuffle each epoch with the run's seed.")


class RolloutSettings(Section):
    group_size: int = Field(8, description="Trajectories of one task.", ge=1)
    max_steps: int = Field(1, description="Steps of one rollout.", ge=1)
    max_tokens: int = Field(256, description="Tokens of one trajectory: prompt, actions and observations.", ge=2)
    max_action_tokens: int = Field(128, description="Tokens of one action.", ge=1)
    max_seconds: float = Field(600.0, description="Seconds of one rollout; over it, it ends as max_seconds and is trained.", gt=0)
    max_environment_seconds: float = Field(120.0, description="Seconds of one environment or reward call; over it, it fails.", gt=0)
    temperature: float = Field(1.0, description="Of sampling and of the learner's log-probabilities.", gt=0, le=10)
    top_k: int = Field(0, description="Refused in training unless 0: the kept sets are not recorded.", ge=0)
    top_p: float = Field(1.0, description="Refused in training unless 1: the kept sets are not recorded.", gt=0, le=1)
    stop_strings: list[str] = Field(default_factory=list, description="Texts that end an action.")
    stop_at_end_token: bool = Field(
        True, description="The tokenizer's end token ends an action, and so does the one with which its chat template ends an answer."
    )
    max_attempts: int = Field(2, description="Attempts at one member before it counts as failed.", ge=1, le=10)
    context: ContextRule = Field(
        ContextRule.TRAJECTORY,
        description="What the policy sees: the trajectory so far, or only the newest observation (Markov environments: single steps can be left out).",
    )
    num_user_processes: int = Field(1, description="Processes a worker for the recipe's Python that is not async.", ge=1, le=64)


class SamplerSettings(Section):
    max_running: int = Field(64, description="Decode slots: sequences in one decode step.", ge=1)
    max_in_flight: int | None = Field(None, description="Rollouts in flight a sampler, waiting ones included; none: only admission bounds them.", ge=1)
    queue_share: float = Field(
        0.25,
        description="Rollouts ready for a decode slot beyond max_running, as a share of it: answers come in bursts, and a short queue keeps the batch full.",
        ge=0,
        le=4,
    )
    kv_memory_bytes: int = Field(256 * 2**20, description="Bytes for the KV cache; rollouts beyond it are computed again when they return.", ge=2**16)
    max_prefill_tokens: int = Field(4096, description="Prompt tokens computed in one step, padding included.", ge=16)
    update_mode: UpdateMode = Field(
        UpdateMode.KEEP,
        description="New weights: keep (running actions go on), wait (they finish first), abort (they are drawn again).",
    )
    apply: Apply = Field(
        Apply.EVERY_STEP,
        description="When new weights are taken up: every_step (at once), key_steps (before the next key step), rollout_start (the sampler drains first).",
    )
    max_apply_delay_seconds: float = Field(1.0, description="apply = key_steps: longest wait for a key step; then new weights are taken up all the same.", ge=0)
    long_share: float = Field(0.5, description="Share of the decode slots that long rollouts may hold while short work waits; 1: no limit.", gt=0, le=1)
    long_factor: float = Field(4.0, description="A rollout is long once it has more than this many times the median tokens of the finished ones.", ge=1)
    verify_memory_bytes: int = Field(
        256 * 2**20, description="Bytes for the distributions that verification needs; tokens beyond it stay as old as they are.", ge=2**16
    )
    recompute_kv: bool = Field(False, description="Compute the KV cache again under new weights (keep mode).")
    gather_seconds: float = Field(0.003, description="Longest wait for more environment answers before a decode step that is not full.", ge=0, le=1)


class MarkSettings(Section):
    """Which steps are key steps. Marks lie over the trajectory; they change no token."""

    environment: bool = Field(True, description="Marks of the environment (Observation.key) count.")
    rules: list[str] = Field(
        default_factory=list,
        description="Marks by rule: `observation:REGEX`, `action:REGEX`, `tool:NAME` (the action calls it), `reward:nonzero | positive | negative`. "
        "`headrace mark RUN --rule ...` shows what one would mark.",
    )
    function: str | None = Field(None, description="`task:function(trajectory) -> [weight a step]`, called when a rollout has ended; see docs/python_api.md.")
    entropy_fraction: float = Field(
        0.0,
        description="Share of the steps that are marked, those of highest mean entropy a token, compared with a worker's newest 2,048; 0 is off.",
        ge=0,
        lt=1,
    )
    min_advantage: float | None = Field(
        None, description="Marks every step of trajectories whose reward lies at least this many standard deviations from the mean of its group.", gt=0
    )


class PoolSettings(Section):
    groups_per_batch: int = Field(16, description="Groups the learner takes for one batch.", ge=1)
    max_staleness: int = Field(8, description="Updates a trained unmarked token may be old. sync: set by the number of updates a batch.", ge=0)
    max_key_staleness: int = Field(2, description="Updates a key token should be old at most; older ones are trained through PPO-clip and counted.", ge=0)
    selection: SelectionRule = Field(SelectionRule.READY_FIRST, description="oldest_first waits for stragglers; ready_first takes what is finished.")
    on_expiry: OnExpiry = Field(
        OnExpiry.SKIP_TOKENS, description="Over max_staleness: skip_tokens (they leave the loss), drop_group (refilled), wait (take before they expire)."
    )
    quorum: int | None = Field(
        None, description="Finished members at which a group may be trained; later ones are trained when they arrive, against all. none: the whole group.", ge=1
    )
    pace_key_steps: bool = Field(
        False, description="Fewer rollouts in flight while key steps are trained older than max_key_staleness; what that costs is shown."
    )
    verify: Verify = Field(Verify.OFF, description="Aged rollouts are checked under the newest weights before they are trained: key_steps, all tokens, off.")
    verify_after: int = Field(1, description="Updates a checked token may be old before its rollout is verified.", ge=0)
    verify_rounds: int = Field(8, description="Verifications of one rollout at most; what is older after that is trained as it is.", ge=1, le=16)
    verify_lenience: float = Field(
        1.0, description="Tokens are accepted with probability min(1, lenience x new / old); over 1 saves tokens and is no longer exact.", ge=1
    )
    verify_rule: CutRule = Field(
        CutRule.ACCEPT, description="For experiments only. random_cuts: a control that cuts as many rollouts as accept does, but anywhere; it is not exact."
    )
    no_signal: NoSignal = Field(NoSignal.FILTER, description="Groups of equal rewards: filter (fill the batch, not trained), refill (replaced), train (kept).")


class LearnerSettings(Section):
    loss: Loss = Field(Loss.PPO_CLIP, description="Policy loss.")
    correction: Correction = Field(Correction.NONE, description="Off-policy correction: a weight on each token, apart from the loss.")
    ratio_level: RatioLevel = Field(RatioLevel.TOKEN, description="Importance ratios of the correction by token or by sequence.")
    ratio_cap: float = Field(2.0, description="truncated: cap; masked, sequence_masked: upper bound of kept ratios.", gt=1)
    ratio_floor: float = Field(0.0, description="masked, sequence_masked: lower bound of kept ratios.", ge=0, lt=1)
    clip_low: float = Field(0.2, description="Ratios are clipped below 1 - clip_low.", gt=0, lt=1)
    clip_high: float = Field(0.28, description="Ratios are clipped above 1 + clip_high.", gt=0)
    advantage: Advantage = Field(Advantage.MEAN_STD, description="Baseline and scale of rewards inside a group.")
    loss_scale: LossScale = Field(
        LossScale.TOKEN, description="token: mean over tokens; sequence: mean over trajectories of token means; constant: sum / max_tokens."
    )
    kl_coefficient: float = Field(0.0, description="Weight of the KL to the frozen reference model.", ge=0)
    entropy_coefficient: float = Field(0.0, description="Weight of an entropy bonus.", ge=0)
    unmarked_fraction: float = Field(
        1.0, description="Probability with which an unmarked step enters the loss, with weight 1 / probability; saves learner time.", gt=0, le=1
    )
    learning_rate: float = Field(3e-4, description="Of AdamW.", gt=0)
    staleness_slope: float = Field(
        0.0, description="The learning rate is divided by 1 + staleness_slope x the mean staleness of the batch, in updates (arXiv 2607.01083).", ge=0
    )
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Learning rate after warm-up, to 0 at the last update.")
    warmup_updates: int = Field(0, description="Updates of linear warm-up.", ge=0)
    betas: tuple[float, float] = Field((0.9, 0.95), description="Of AdamW.")
    epsilon: float = Field(1e-8, description="Of AdamW.", gt=0)
    weight_decay: float = Field(0.0, description="Of AdamW.", ge=0)
    max_gradient_norm: float = Field(1.0, description="Gradients are scaled down to it.", gt=0)
    num_minibatches: int = Field(1, description="Updates a batch, each on a part of it.", ge=1)
    num_epochs: int = Field(1, description="Passes over a batch.", ge=1)
    micro_batch_tokens: int = Field(8192, description="Tokens, padding included, of one forward and backward.", ge=16)
    max_refused_updates: int = Field(5, description="Refused updates in a row that count as failure: see governor.on_failure.", ge=1)

    @property
    def compares_whole_trajectories(self) -> bool:
        """The loss or the correction takes an importance ratio over all tokens of a trajectory."""
        corrected = self.correction is Correction.SEQUENCE_MASKED or self.ratio_level is RatioLevel.SEQUENCE
        return self.loss in (Loss.GSPO, Loss.TOPR) or (corrected and self.correction is not Correction.NONE)


class EvaluationSettings(Section):
    every_updates: int = Field(0, description="Updates between evaluations during training; 0: only before and after.", ge=0)
    num_tasks: int = Field(128, description="Tasks of one evaluation.", ge=1)
    samples_per_task: int = Field(1, description="Rollouts of each task; 0: only the recipe's evaluate function.", ge=0)
    temperature: float = Field(1.0, description="0 is greedy.", ge=0)
    top_k: int = Field(0, description="0 is off.", ge=0)
    top_p: float = Field(1.0, description="1 is off.", gt=0, le=1)
    metric: str = Field("reward", description="What mean and curve show: `reward` or a name that the evaluate function returns.")


class CheckpointSettings(Section):
    every_updates: int = Field(0, description="Updates between checkpoints; 0: by time only.", ge=0)
    every_seconds: float = Field(
        120.0, description="Time between checkpoints, stretched where saving would cost the learner over 2 % of its time; 0: by updates only.", ge=0
    )
    memory_copy: bool = Field(
        False, description="After each update the learner's state is copied into memory that outlives its process: if that is lost, at most one update is."
    )
    keep: int = Field(2, description="Newest checkpoints kept; the best one (by evaluation, else by training reward) stays besides.", ge=1)
    interrupt_seconds: float = Field(
        20.0, description="For a last checkpoint after Ctrl-C or SIGTERM, where something was learned since the last one; 0: none is saved.", ge=0
    )


class GovernorSettings(Section):
    """What is done when updates do harm. docs/governor.md says how it works and what it was shown to do."""

    explosion_factor: float = Field(
        300.0,
        description="Updates are refused whose gradient norm is over so many times its running median (and over max_gradient_norm), or whose "
        "KL(sampler || learner) is over 1 nat a token and 10 times its running median. 0: only those that are not finite.",
        ge=0,
    )
    adapt_staleness: bool = Field(
        False,
        description="Lower the staleness bound in effect while updates miss the targets below; raise it again, up to pool.max_staleness, when there is room.",
    )
    target_sample_size: float = Field(
        0.5, description="Effective sample size of an update, as a fraction of its tokens, under which the bound is tightened.", ge=0, le=1
    )
    target_kl: float = Field(0.1, description="KL(sampler || learner) of an update, nats a token, over which the bound is tightened.", gt=0)
    patience_updates: int = Field(
        3, description="Updates in a row that miss a target before the bound is tightened; four times as many good ones loosen it.", ge=1
    )
    collapse_sample_size: float = Field(0.1, description="Effective sample size under which an update counts as collapsed.", ge=0, le=1)
    collapse_kl: float = Field(0.5, description="KL(sampler || learner), nats a token, over which an update counts as collapsed.", gt=0)
    collapse_updates: int = Field(3, description="Collapsed updates in a row, batches without signal after one included, that count as failure.", ge=1)
    reward_drop: float | None = Field(
        None, description="Share of the gain in reward so far whose loss, as a mean over 10 batches, counts as failure; none: reward is not judged.", gt=0, le=1
    )
    on_failure: OnFailure = Field(
        OnFailure.STOP, description="stop: the run ends with the cause. skip: it goes on. roll_back: from the last good checkpoint with a lower learning rate."
    )
    learning_rate_factor: float = Field(0.5, description="The learning rate is multiplied by it at each roll-back.", gt=0, le=1)
    max_roll_backs: int = Field(3, description="Roll-backs of a run; one failure more ends it.", ge=1)


class LimitSettings(Section):
    startup_seconds: float = Field(300.0, description="For a role to start.", gt=0)
    batch_seconds: float = Field(1800.0, description="For the next batch to be ready.", gt=0)
    report_seconds: float = Field(120.0, description="Without a sign of life from a rollout worker.", gt=0)
    learn_seconds: float = Field(1800.0, description="For one batch to be learned.", gt=0)
    apply_seconds: float = Field(120.0, description="For a sampler to take up new weights where that is waited for.", gt=0)
    evaluate_seconds: float = Field(1800.0, description="For one evaluation.", gt=0)
    save_seconds: float = Field(600.0, description="For one checkpoint.", gt=0)
    stop_seconds: float = Field(5.0, description="For a role to end by itself; then it is killed.", gt=0)
    max_restarts: int = Field(
        3, description="Restarts of each sampler, the evaluator and the learner within restart_window_seconds; one loss more ends the run.", ge=0
    )
    restart_window_seconds: float = Field(600.0, description="See max_restarts.", gt=0)


class Settings(Section):
    """Everything a run can be told."""

    run: RunSettings = Field(RunSettings(), description="The run as a whole.")
    model: ModelSettings = Field(ModelSettings(), description="The policy.")
    warm_start: WarmStartSettings = Field(WarmStartSettings(), description="Supervised start of a model from scratch, cached.")
    task: TaskSettings = Field(TaskSettings(), description="The recipe's tasks and Python.")
    rollout: RolloutSettings = Field(RolloutSettings(), description="How one rollout goes.")
    sampler: SamplerSettings = Field(SamplerSettings(), description="The decode engine.")
    marks: MarkSettings = Field(MarkSettings(), description="Key steps: which steps are marked.")
    pool: PoolSettings = Field(PoolSettings(), description="Experience pool: batches and staleness.")
    learner: LearnerSettings = Field(LearnerSettings(), description="Loss and optimizer.")
    evaluation: EvaluationSettings = Field(EvaluationSettings(), description="Evaluations.")
    checkpoint: CheckpointSettings = Field(CheckpointSettings(), description="Checkpoints.")
    governor: GovernorSettings = Field(GovernorSettings(), description="What is done when updates do harm.")
    limits: LimitSettings = Field(LimitSettings(), description="Longest waits; each error names who did not answer.")

    @property
    def batch_trajectories(self) -> int:
        return self.pool.groups_per_batch * self.rollout.group_size

    @property
    def updates_per_batch(self) -> int:
        return self.learner.num_minibatches * self.learner.num_epochs

    @property
    def max_staleness(self) -> int:
        """Updates; in sync what follows from the number of updates a batch."""
        return self.updates_per_batch - 1 if self.run.mode is Mode.SYNC else self.pool.max_staleness

    @property
    def waits_for_acknowledgements(self) -> bool:
        """Only sync and max_staleness 0 wait until every sampler has taken up an update."""
        return self.run.mode is Mode.SYNC or self.pool.max_staleness < self.updates_per_batch

    @property
    def _least_quorum(self) -> int:
        return 1 if self.learner.advantage is Advantage.NONE else 2

    def check_rules(self) -> list[tuple[str, str, str]]:
        """Rules between settings that are broken: (dotted key, what is wrong, what to do)."""
        broken: list[tuple[str, str, str]] = []
        if self.run.placement is Placement.COLOCATED and self.run.mode is not Mode.SYNC:
            broken.append(("run.placement", "colocated devices cannot sample and learn at once", "Set run.mode = 'sync' or run.placement = 'split'."))
        if self.run.placement is Placement.COLOCATED and self.run.num_samplers != self.run.num_learner_ranks:
            broken.append(("run.num_samplers", "colocated devices both sample and learn", "Set run.num_samplers and run.num_learner_ranks to the same number."))
        if self.rollout.top_k or self.rollout.top_p < 1:
            broken.append(
                (
                    "rollout.top_k" if self.rollout.top_k else "rollout.top_p",
                    "top-k and top-p in training change the distribution without a record of what was kept",
                    "Use 0 and 1; evaluation.top_k and evaluation.top_p are free.",
                )
            )
        group_relative = self.learner.advantage is not Advantage.NONE
        if group_relative and self.rollout.group_size < 2:
            broken.append(
                (
                    "rollout.group_size",
                    f"advantage '{self.learner.advantage}' compares members of a group, one alone has no signal",
                    "Use at least 2, or learner.advantage = 'none'.",
                )
            )
        if self.run.mode is Mode.ASYNC and self.pool.max_staleness < self.updates_per_batch - 1:
            broken.append(
                (
                    "pool.max_staleness",
                    f"a batch makes {self.updates_per_batch} updates, so its last part is {self.updates_per_batch - 1} updates old",
                    f"Use at least {self.updates_per_batch - 1}.",
                )
            )
        if self.pool.quorum is not None and not self._least_quorum <= self.pool.quorum <= self.rollout.group_size:
            broken.append(
                (
                    "pool.quorum",
                    f"a group has {self.rollout.group_size} members (rollout.group_size) and its baseline needs {self._least_quorum}",
                    f"Use {self._least_quorum} to {self.rollout.group_size}, or none.",
                )
            )
        if self.run.mode is Mode.SYNC and self.pool.verify is not Verify.OFF:
            broken.append(("pool.verify", "synchronous rollouts are never old", "Set pool.verify = 'off' or run.mode = 'async'."))
        if self.checkpoint.memory_copy and not (self.checkpoint.every_updates or self.checkpoint.every_seconds):
            needs = "the journal, which goes with the copy, is written between checkpoints only"
            broken.append(("checkpoint.memory_copy", needs, "Set checkpoint.every_updates or checkpoint.every_seconds."))
        if self.learner.num_minibatches > self.pool.groups_per_batch:
            broken.append(("learner.num_minibatches", f"a batch has only {self.pool.groups_per_batch} groups", "Use fewer minibatches or more groups."))
        if (self.learner.loss is Loss.DECOUPLED_PPO) != (self.learner.correction is Correction.DECOUPLED):
            broken.append(("learner.correction", "loss decoupled_ppo and correction decoupled belong together", "Set both or neither."))
        if self.learner.unmarked_fraction < 1 and self.learner.compares_whole_trajectories:
            broken.append(
                (
                    "learner.unmarked_fraction",
                    "the ratio of a whole trajectory needs all its steps",
                    "Use 1, or ratios by token (learner.ratio_level = 'token', another loss than gspo and topr).",
                )
            )
        if self.model.path is not None and self.model.prepare is not None:
            broken.append(("model.prepare", "model.path is set too", "Set one of them; 'none' on the command line unsets the other."))
        from_elsewhere = self.model.path is not None or self.model.prepare is not None
        if not from_elsewhere and (self.model.architecture is None or self.model.characters is None):
            broken.append(("model.path", "no model", "Give model.path or model.prepare, or model.architecture and model.characters for a model from scratch."))
        if self.model.architecture is not None and "model_type" not in self.model.architecture:
            broken.append(("model.architecture", "model_type is missing", "Name one, for example 'qwen2'."))
        if self.task.source is None:
            broken.append(("task.source", "no tasks", "Name a JSONL or Parquet file, `hf:NAME` or `task:function`."))
        if self.task.environment is None and self.task.reward is None:
            broken.append(("task.reward", "nothing grades the answers", "Name a reward function or an environment."))
        if self.rollout.max_action_tokens >= self.rollout.max_tokens:
            broken.append(("rollout.max_action_tokens", f"must be below rollout.max_tokens ({self.rollout.max_tokens})", "Lower it or raise the other."))
        positions = (self.model.architecture or {}).get("max_position_embeddings")
        if isinstance(positions, int) and not from_elsewhere and self.rollout.max_tokens > positions:
            limit = f"must be at most model.architecture.max_position_embeddings ({positions}), the model's longest context"
            broken.append(("rollout.max_tokens", limit, "Lower it or raise the other."))
        for rule in self.marks.rules:
            try:
                parse_rule(rule)
            except RuleError as error:
                broken.append(("marks.rules", error.what, error.remedy))
        if self.evaluation.samples_per_task == 0 and self.task.evaluate is None:
            broken.append(("evaluation.samples_per_task", "0 needs a recipe evaluate function", "Use 1 or more, or set task.evaluate."))
        return broken
