"""The `[algorithm]` section: what is optimised, and how stale or mismatched data is corrected.

`name` chooses a row of `PRESETS`; a field given beside it wins over the preset. The resolved config carries
every field, so a preset that changes later does not change a run that was written down.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rollbook.section import Section

AlgorithmName = Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "ppo", "gspo", "cispo", "distill"]
EstimatorName = Literal["group_mean", "leave_one_out", "returns", "gae", "none"]
ScaleName = Literal["none", "group_std", "batch_std"]
LossName = Literal["clip", "gspo", "cispo", "reinforce"]
AggregationName = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
]
KLEstimatorName = Literal["k1", "k2", "k3"]

PRESETS: Mapping[AlgorithmName, Mapping[str, Any]] = {
    # arXiv:2402.03300, without its KL term.
    "grpo": {},
    # arXiv:2503.20783: neither the group's spread nor the response's length scales the gradient.
    "dr_grpo": {"scale": "none", "aggregation": "sequence_mean_token_sum_norm"},
    # arXiv:2503.14476: clip-higher, token mean, dynamic sampling, soft overlong penalty.
    "dapo": {
        "aggregation": "token_mean",
        "clip_eps_high": 0.28,
        "filter": {"drop_flat": True, "refill": True},
        "overlong": {"buffer_frac": 0.2, "penalty": 1.0},
    },
    # arXiv:2402.14740: leave-one-out baseline; the constant divisor only scales the sum over tokens.
    "rloo": {
        "estimator": "leave_one_out",
        "scale": "none",
        "aggregation": "sequence_mean_token_sum_norm",
    },
    # arXiv:2501.03262: no group baseline, returns whitened over the loss tokens of the batch.
    "reinforce_pp": {"estimator": "returns", "scale": "batch_std", "aggregation": "token_mean"},
    # arXiv:1707.06347 with a critic.
    "ppo": {"estimator": "gae", "scale": "batch_std", "aggregation": "token_mean", "gae_lambda": 0.95},
    # arXiv:2507.18071: the ratio of the whole sequence, so the clip is three orders narrower.
    "gspo": {"loss": "gspo", "clip_eps_low": 3e-4, "clip_eps_high": 4e-4},
    # arXiv:2506.13585: the weight is clipped, never the gradient; no lower bound.
    "cispo": {"loss": "cispo", "aggregation": "token_mean", "clip_eps_low": 1.0, "clip_eps_high": 4.0},
    # Reverse KL to a teacher on the student's own tokens; no reward.
    "distill": {
        "estimator": "none",
        "scale": "none",
        "aggregation": "token_mean",
        "distill": {"placement": "advantage", "coef": 1.0},
    },
}
"""What each name changes from the fields' defaults. KL and entropy terms are off in all of them: a reference
model costs memory and a forward, so asking for one is the user's line in the config."""


class KLConfig(Section):
    """Penalty for leaving the reference policy."""

    placement: Literal["none", "loss", "reward"] = "none"
    """`loss` adds the term to the loss; `reward` subtracts it from each action token's reward."""
    estimator: KLEstimatorName = "k3"
    """k1 = log ratio, k2 = half its square, k3 = ratio - 1 - log ratio (current against reference)."""
    coef: float = Field(default=0.0, ge=0)
    """Weight of the term, in reward units per nat."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if (self.placement == "none") != (self.coef == 0):
            raise ValueError(
                f"kl.placement is {self.placement!r} and kl.coef is {self.coef}: the term would have no effect; "
                "set both (placement loss or reward and a positive coef) or neither"
            )
        if self.placement == "loss" and self.estimator == "k1":
            raise ValueError(
                "kl.estimator k1 in the loss has an expected gradient of zero; use k2 (its gradient is that of "
                "the reverse KL) or k3, or kl.placement = 'reward'"
            )
        return self


class OverlongConfig(Section):
    """Soft penalty on responses near the token limit (DAPO, eq. 13)."""

    buffer_frac: float = Field(default=0.0, ge=0, le=1)
    """Share of the token limit over which the penalty grows from 0 to `penalty`; 0 is off."""
    penalty: float = Field(default=1.0, ge=0)
    """Subtracted from the reward at the limit, in reward units."""


class FilterConfig(Section):
    """Which groups and tokens reach the trainer."""

    drop_flat: bool = False
    """Drop groups whose members all have the same `metric` (dynamic sampling): they carry no signal."""
    refill: bool = False
    """Replace a dropped group by another prompt's, so that every step trains as many groups (DAPO). False: the
    step is smaller."""
    metric: str = "score"
    """What is compared: `score` (the raw task score), `reward` (after shaping), or the name of a reward term."""
    min_scored: int = Field(default=1, ge=1)
    """Groups with fewer scored members are dropped as failed."""
    mask_truncated: bool = False
    """Take no loss on trajectories that a limit ended (response tokens, turns or context); they still count in the
    group's baseline."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if not self.drop_flat and self.metric != "score":
            raise ValueError(
                f"filter.metric is {self.metric!r} and filter.drop_flat is false: nothing is compared; set drop_flat "
                "= true, or leave metric out"
            )
        if self.refill and not self.drop_flat and self.min_scored == 1:
            raise ValueError(
                "filter.refill is true and no filter drops a group (drop_flat is false, min_scored 1); set drop_flat "
                "= true, or leave refill out (failed groups have buffer.refill_failed)"
            )
        return self


RejectStatistic = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]


class RejectConfig(Section):
    """Tokens or whole sequences that leave the loss because behavior and proximal policy disagree too much."""

    statistic: Literal["none"] | RejectStatistic = "none"
    """`token` judges each token; the others judge a sequence by the sum, mean or maximum over its tokens."""
    estimator: KLEstimatorName = "k3"
    """Per-token divergence of the proximal from the behavior policy, in nats; only k1 is signed."""
    upper_nats: float | None = None
    """Above this the token or sequence is rejected."""
    lower_nats: float | None = None
    """Below this likewise; for k1 only, the others are never negative."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        bounds = (self.lower_nats, self.upper_nats)
        if self.statistic == "none" and bounds != (None, None):
            raise ValueError(
                f"correction.reject has bounds {bounds} and statistic 'none': nothing would be rejected; "
                "choose token, sequence_sum, sequence_mean or sequence_max"
            )
        if self.statistic != "none" and bounds == (None, None):
            raise ValueError(
                f"correction.reject.statistic is {self.statistic!r} without a bound: nothing would be rejected; "
                "set upper_nats"
            )
        if self.lower_nats is not None and self.estimator != "k1":
            raise ValueError(
                f"correction.reject.lower_nats with estimator {self.estimator}: it is never negative; use k1"
            )
        if self.lower_nats is not None and self.statistic == "sequence_max":
            raise ValueError(
                f"correction.reject.lower_nats is {self.lower_nats} with statistic 'sequence_max', which is at least "
                "0: nothing would be rejected; leave it out, or use sequence_mean or token"
            )
        if self.lower_nats is not None and self.upper_nats is not None and self.lower_nats >= self.upper_nats:
            raise ValueError(f"correction.reject bounds {bounds} leave nothing between them; swap them")
        for name, excludes in (
            ("upper_nats", self.upper_nats is not None and not self.upper_nats > 0),
            ("lower_nats", self.lower_nats is not None and not self.lower_nats < 0),
        ):
            if excludes:
                raise ValueError(
                    f"correction.reject.{name} is {getattr(self, name)}: where behavior and proximal policy agree the "
                    "statistic is 0, so that all on-policy tokens would be rejected; use an upper_nats above 0 and a "
                    "lower_nats below 0"
                )
        return self


class CorrectionConfig(Section):
    """Importance weights for stale tokens and engine mismatch: exp(proximal - behavior), bounded.

    With `algorithm.proximal = "behavior"` they are exp(current - behavior), taken at each update.
    """

    level: Literal["none", "token", "sequence", "geometric"] = "none"
    """One weight a token; or one a sequence: the product over its action tokens, or their geometric mean."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Outside the bounds a weight is set to the bound, or the token (sequence) leaves loss and denominator."""
    lower: float = Field(default=0.0, ge=0)
    """Smallest weight; 0 is no bound."""
    upper: float = Field(default=2.0, gt=0)
    """Largest weight."""
    reject: RejectConfig = RejectConfig()
    """Rejection by divergence, besides the weights or instead of them."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if self.lower >= self.upper:
            raise ValueError(
                f"correction.lower {self.lower} is not below correction.upper {self.upper}; swap them"
            )
        if not self.lower <= 1 <= self.upper:
            raise ValueError(
                f"correction bounds [{self.lower}, {self.upper}] leave out 1, the weight of every on-policy token, "
                "which would be scaled or masked like a stale one; use a lower of at most 1 and an upper of at least 1"
            )
        if self.level == "none" and (self.mode, self.lower, self.upper) != ("truncate", 0.0, 2.0):
            raise ValueError(
                f"correction has mode {self.mode!r} and bounds [{self.lower}, {self.upper}] but level 'none': "
                "it would have no effect; choose token, sequence or geometric"
            )
        return self

    @property
    def is_on(self) -> bool:
        return self.level != "none" or self.reject.statistic != "none"

    @property
    def changes_mask(self) -> bool:
        """Whether tokens leave the loss, so that weights must be known before denominators are counted."""
        return (self.level != "none" and self.mode == "mask") or self.reject.statistic != "none"


class DistillConfig(Section):
    """Reverse KL to a teacher on the tokens the policy sampled."""

    placement: Literal["none", "loss", "advantage"] = "none"
    """`advantage` adds coef x (teacher - proximal logprob) to each token's advantage; `loss` adds a term."""
    estimator: Literal["k2", "k3"] = "k2"
    """Of the loss term; k2 has the gradient of the reverse KL."""
    coef: float = Field(default=0.0, ge=0)
    """Weight, in reward units per nat."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if (self.placement == "none") != (self.coef == 0):
            raise ValueError(
                f"distill.placement is {self.placement!r} and distill.coef is {self.coef}: the term would have "
                "no effect; set both or neither"
            )
        return self


class AlgorithmConfig(Section):
    """What is optimised. `name` sets the defaults of the other fields (table PRESETS)."""

    name: AlgorithmName = "grpo"
    """Preset: grpo, dr_grpo, dapo, rloo, reinforce_pp, ppo, gspo, cispo or distill."""
    estimator: EstimatorName = "group_mean"
    """Baseline of the reward: the group's mean, the mean of the other members, none (discounted `returns` per
    token), or a critic (`gae`). `none` gives zeros, for a distillation term alone."""
    scale: ScaleName = "group_std"
    """What advantages are divided by: nothing, the standard deviation of the group's rewards, or that of the
    advantages of all loss tokens of the batch (`returns` and `gae` are also centred on their mean)."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per action token, for `gae` and `returns`."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """Lambda of GAE per action token."""
    truncation: Literal["zero", "last_value"] = "zero"
    """Value after the last token of a trajectory that a limit ended: zero (the limit is part of the task and
    the scorer has judged what was written) or the critic's value before the last token."""
    loss: LossName = "clip"
    """Policy loss: clipped ratio, sequence ratio (gspo), clipped weight (cispo), or plain reinforce."""
    aggregation: AggregationName = "sequence_mean_token_mean"
    """How token losses become one number: mean over loss tokens; mean over sequences of the token mean, of the
    token sum, or of the token sum over the token limit."""
    clip_eps_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio is clipped below at 1 - this."""
    clip_eps_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped above at 1 + this."""
    dual_clip: float = Field(default=0.0, ge=0)
    """Largest loss of a token with negative advantage, as a multiple of it; 0 is off, else above 1."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus, in reward units per nat."""
    proximal: Literal["recompute", "behavior"] = "recompute"
    """Trust-region anchor: the trainer's logprobs at the start of the step (one more forward), or the engine's
    own (bypass: the clip then also acts on staleness and engine mismatch)."""
    value_clip_eps: float = Field(default=0.2, ge=0)
    """The critic may move this far from its value at the start of the step, in reward units; 0 is off."""
    kl: KLConfig = KLConfig()
    """Penalty against the reference policy."""
    overlong: OverlongConfig = OverlongConfig()
    """Penalty near the token limit."""
    filter: FilterConfig = FilterConfig()
    """Which groups and tokens are trained."""
    correction: CorrectionConfig = CorrectionConfig()
    """Importance weights and rejection."""
    distill: DistillConfig = DistillConfig()
    """Teacher term."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        preset = PRESETS.get(data.get("name", "grpo"))
        return data if preset is None else _merge(preset, data)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if 0 < self.dual_clip <= 1:
            raise ValueError(
                f"algorithm.dual_clip is {self.dual_clip}; use 0 (off) or a value above 1, such as 3"
            )
        if self.dual_clip and self.loss != "clip":
            raise ValueError(f"algorithm.dual_clip has no effect with loss {self.loss!r}; set it to 0")
        if self.estimator == "none":
            self._check_without_reward()
        if self.scale == "group_std" and self.estimator not in ("group_mean", "leave_one_out"):
            raise ValueError(
                f"algorithm.scale 'group_std' has no effect with estimator {self.estimator!r}; "
                "use none or batch_std"
            )
        if self.proximal == "behavior" and self.correction.is_on:
            self._check_bypass()
        return self

    def _check_without_reward(self) -> None:
        if self.distill.placement == "none":
            raise ValueError(
                "algorithm.estimator is 'none' without a distill term: nothing would be learned; "
                "choose an estimator or set [algorithm.distill]"
            )
        for what, is_set, instead in (
            ("kl.placement 'reward'", self.kl.placement == "reward", "use kl.placement = 'loss'"),
            ("overlong.buffer_frac", self.overlong.buffer_frac > 0, "set it to 0"),
            ("scale 'batch_std'", self.scale == "batch_std", "use scale = 'none'"),
        ):
            if is_set:
                raise ValueError(
                    f"algorithm.{what} has no effect with estimator 'none', which reads no reward; {instead}, or "
                    "choose another estimator"
                )

    def _check_bypass(self) -> None:
        if self.correction.changes_mask:
            raise ValueError(
                "algorithm.correction masks or rejects tokens while algorithm.proximal is 'behavior': the mask "
                "needs the trainer's logprobs before the step; use proximal = 'recompute', or mode = 'truncate'"
            )
        if self.loss != "reinforce":
            raise ValueError(
                f"algorithm.correction would have no effect: with proximal 'behavior' every weight is 1 and the "
                f"{self.loss} loss already takes its ratio against the behavior policy; use proximal = "
                "'recompute', or loss = 'reinforce' (weights current / behavior), or correction.level = 'none'"
            )

    @property
    def needs_group(self) -> bool:
        """Whether a group of one has no baseline, so that group_size must be at least 2."""
        return self.estimator in ("group_mean", "leave_one_out")

    @property
    def needs_values(self) -> bool:
        """Whether a critic must be trained."""
        return self.estimator == "gae"

    @property
    def needs_proximal_first(self) -> bool:
        """Whether proximal logprobs are read before the first update, so that the shortcut of taking the current
        policy's own (one update a step, on policy) cannot be used."""
        reads = (
            self.correction.is_on or self.kl.placement == "reward" or self.distill.placement == "advantage"
        )
        return reads and self.proximal == "recompute"

    def needs_proximal(self, updates_per_step: int) -> bool:
        """Whether a forward must give the trust-region anchor before the updates: with one update a step it is the
        current policy, and nobody else reads it first."""
        return self.proximal != "behavior" and (self.needs_proximal_first or updates_per_step > 1)

    @property
    def needs_reference(self) -> bool:
        return self.kl.placement != "none"

    @property
    def needs_teacher(self) -> bool:
        return self.distill.placement != "none"


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` wins; tables are merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        held = merged.get(key)
        merged[key] = (
            _merge(held, value) if isinstance(held, Mapping) and isinstance(value, Mapping) else value
        )
    return merged
