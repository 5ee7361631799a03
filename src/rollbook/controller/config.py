"""The run itself: its name, its length, its schedule, its evaluation and its warm-up."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rollbook.envs.config import EndpointConfig
from rollbook.section import Section


class RunSection(Section):
    """What the run is called, how long it is, and which schedule it follows."""

    name: str = "run"
    """Names the run directory, `dir`/`name`."""
    dir: str = "runs"
    """Folder of run directories."""
    seed: int = 0
    """Decides every draw: data order, sampling, initial weights."""
    num_steps: int = Field(ge=0)
    """Turns of the main loop. 0 stops after the warm-up and the first evaluation."""
    groups_per_step: int = Field(ge=1)
    """Groups (prompts) the trainer consumes in one step."""
    schedule: Literal["sync", "colocate_async", "separate_async"] = "sync"
    """Who owns the device when; see docs/architecture.md."""
    max_failure_frac: float = Field(default=0.25, ge=0, le=1)
    """Share of recent trajectories that may fail before the run stops. Failures are never rewards of zero."""
    max_turns: int = Field(default=1, ge=1)
    """Turns of one trajectory: more than 1 for environments that answer."""

    @field_validator("name")
    @classmethod
    def _is_one_folder(cls, name: str) -> str:
        if name in ("", ".", "..") or any(c in "/\\" or not c.isprintable() for c in name):
            raise ValueError("must be the name of one folder below run.dir; to put it elsewhere set run.dir")
        return name


class EvalSection(Section):
    """Evaluation on held-out prompts, by the same engine under the newest proven version."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: only before the first and after the last step, if there are prompts."""
    num_prompts: int = Field(default=0, ge=0)
    """Held-out prompts; 0: no evaluation."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Responses for each prompt; their mean is reported."""
    baseline: EndpointConfig | None = None
    """A model to compare with, behind a server: it is asked the same prompts as a chat, once, before the first step."""

    @model_validator(mode="after")
    def _baseline_is_asked(self) -> Self:
        if self.baseline is not None and not self.num_prompts:
            raise ValueError(
                "there is an eval.baseline and eval.num_prompts is 0; raise it, or remove the table"
            )
        return self


class WarmupSection(Section):
    """A short supervised phase on the task's own reference answers, before the first step."""

    num_updates: int = Field(default=0, ge=0)
    """Optimizer updates; 0: none."""
    batch_sequences: int = Field(default=256, ge=1)
    """Sequences of one update."""
    learning_rate: float = Field(default=2e-3, gt=0)
    """Peak learning rate; linear warm-up over a tenth of the updates, then linear decay."""
    until_exact_frac: float = Field(default=1.0, gt=0, le=1)
    """Stop early once this share of held-out prompts is answered exactly (greedy)."""
    check_every_updates: int = Field(default=50, ge=1)
    """Updates between those checks."""


class PlanSection(Section):
    """Where the expectation beside every measurement comes from."""

    hardware: str = ""
    """A `hardware.toml` written by `rollbook calibrate`; empty: measure this machine for a few seconds first."""
    response_tokens: float = Field(default=0.0, ge=0)
    """Expected mean response length; 0: measured on the first prompts during calibration."""
    is_on: bool = True
    """False: no calibration, no expectation."""


class LendingSection(Section):
    """Whether the trainer's device generates while the trainer waits for its groups (`separate_async`)."""

    is_on: bool = False
    """Keep one more native engine on the trainer's device, asleep, and let it serve while the trainer waits, where that
    is expected to save more than it costs. Both are measured: docs/async.md says how."""
    margin: float = Field(default=1.0, ge=0)
    """Times its measured cost (bringing the engine up and taking the device back) that a lending must be expected to
    save before it is tried, and kept where waits with it are measured to be faster; 0 lends in every wait, untried."""
    num_slots: int = Field(default=0, ge=0)
    """Sequences the lent engine runs at once; 0: `rollout.num_slots`."""
    kv_pool_tokens: int = Field(default=0, ge=0)
    """Tokens of the lent engine's KV pool, which lies beside the trainer's state; 0: `rollout.kv_pool_tokens`."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        changed = [n for n, field in type(self).model_fields.items() if getattr(self, n) != field.default]
        if changed and not self.is_on:
            raise ValueError(
                f"lending.is_on is false, so lending.{changed[0]} has no effect: set it to true, or remove the table"
            )
        return self
