"""What the simulation needs to know: a scenario, and the seconds of a decode step by the sequences in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rollbook.errors import PlanError, nearest_name
from rollbook.ledger.quantity import require_number
from rollbook.ledger.workload import MODES, Mode
from rollbook.observe.numbers import counted
from rollbook.planner.sim_draws import Draw


@dataclass(frozen=True, slots=True)
class DecodeTable:
    """Seconds of a decode step with n live sequences: `base_s[n] + context_s[n] * context tokens`."""

    base_s: tuple[float, ...]
    """[num_slots + 1] seconds that do not depend on the context: weights, GEMMs, launches."""
    context_s: tuple[float, ...]
    """[num_slots + 1] seconds for each token of context held by the live sequences together."""

    @classmethod
    def of(
        cls, step_s: Callable[[int, float], float], *, num_slots: int, context_tokens: float
    ) -> DecodeTable:
        """Tabulate `step_s(live sequences, mean context tokens of each)` as a line up to `context_tokens`.

        Exact where the cost is affine in the context. Above 256 slots, 256 counts are asked and the rest is
        interpolated.
        """
        counts = np.unique(np.linspace(1, num_slots, min(num_slots, 256)).round().astype(int))
        base = np.array([step_s(int(n), 0.0) for n in counts])
        full = np.array([step_s(int(n), context_tokens) for n in counts])
        slope = np.maximum(full - base, 0.0) / (counts * max(context_tokens, 1.0))
        every = np.arange(num_slots + 1)
        return cls(
            tuple(np.interp(every, counts, base).tolist()), tuple(np.interp(every, counts, slope).tolist())
        )

    @property
    def num_slots(self) -> int:
        return len(self.base_s) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything the simulation needs to know. Seconds and tokens are those of one replica or one step."""

    mode: Mode
    num_replicas: int
    slots_per_replica: int
    rollout_used_frac: float = 1.0
    """Share of the rollout GPUs that belong to a replica; the rest is idle."""
    decode: DecodeTable
    groups_per_step: int
    group_size: int
    response_tokens: Draw
    """Sampled tokens of a trajectory, over all its turns."""
    max_response_tokens: float = math.inf
    """Limit that grown responses keep to."""
    prompt_tokens: float = 0.0
    kv_pool_tokens: float = math.inf
    """Tokens of context that a replica holds; when they are used up its youngest sequence is preempted. One sequence
    goes on in any case."""
    shares_prompt: bool = True
    """Members of a group that start on one replica prefill their prompt once."""
    prefill_token_s: float = 0.0
    """Seconds a replica's decoding stands still for each token it prefills."""
    num_turns: Draw | None = None
    """Turns of a trajectory (rounded, at least 1); None: one turn."""
    env_s: Draw | None = None
    """Seconds of the environment between two turns."""
    observation_tokens: float = 0.0
    """Tokens the environment adds after each turn but the last; they are prefilled."""
    holds_slot_in_env: bool = True
    """Keep slot and KV while the environment works; else give both up and prefill the context again."""
    judge_s: float = 0.0
    """Seconds a replica's decoding stands still to judge a finished trajectory: a generative reward on the "
    "engines."""
    reward_s: Draw | None = None
    """Seconds from the last token of a trajectory to its reward, on no GPU of either side."""
    forward_s: float = 0.0
    """Trainer seconds of one step before the first update that need the whole of an update's groups."""
    train_s: float = 0.0
    """Trainer seconds of one step, all its updates together."""
    switch_s: float = 0.0
    """Colocated only: both hand-overs of a step (engine to trainer and back)."""
    gather_s: float = 0.0
    """Trainer seconds of a publication during which the engines go on."""
    sync_pause_s: float = 0.0
    """Seconds of a publication during which neither side works."""
    sync_every: int = 1
    """Updates of a step, that is between two publications. With `separate_async` each waits for its own share of
    the step's groups only; the other modes collect the whole step first."""
    max_staleness_steps: int = 0
    """Versions the trainer may be ahead of the oldest token it trains on. The sync modes ignore it (0)."""
    take: str = "admission"
    """`admission` order, or `arrival` order."""
    on_stale: str = "drop"
    """In arrival order: `drop` a finished group that is too old, or `wait` for those that would be."""
    on_publish: str = "keep"
    """Running responses at a publication: `keep` (go on under the new version), `drain` (are awaited) or
    `abort` (start over)."""
    recomputes_kv: bool = False
    """With `keep`: the context of running responses is prefilled again under the new weights."""
    trajectory_failure_frac: float = 0.0
    """Share of trajectories that end without a reward; their siblings go on."""
    replica_mtbf_s: float = math.inf
    """Mean seconds between failures of one replica; its running responses go back to the queue."""
    replica_recovery_s: float = 0.0
    keeps_tokens_of_lost_replica: bool = True
    """The router remembers sampled tokens, so that another replica prefills and continues them."""
    num_lent_replicas: int = 0
    """Replicas that idle training GPUs form while they wait; `separate_async` only."""
    lend_switch_s: float = 0.0
    """Seconds to turn training GPUs into replicas, and again back; a last wait above twice both lends them."""
    length_growth_frac: float = 0.0
    """Growth of response lengths from one step to the next."""
    num_steps: int = 10
    num_warmup_steps: int = 2
    """Steps left out of the averages."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise PlanError(f"mode is {self.mode!r}", nearest_name(self.mode, MODES))
        for name in _AT_LEAST_ONE:
            require_number(name, getattr(self, name), least=1, remedy="use at least 1")
        for name in _NOT_NEGATIVE:
            require_number(name, getattr(self, name), least=0, remedy="use zero or more")
        if not self.kv_pool_tokens >= 1:
            raise PlanError(
                f"kv_pool_tokens is {self.kv_pool_tokens}", "use at least 1, or infinity: no limit"
            )
        if not 0 < self.rollout_used_frac <= 1:
            raise PlanError(f"rollout_used_frac is {self.rollout_used_frac}", "use a share above 0, up to 1")
        if not self.replica_mtbf_s > 0:
            raise PlanError(
                f"replica_mtbf_s is {self.replica_mtbf_s}", "use seconds above 0, or infinity: never"
            )
        num_sequences = self.num_steps * self.groups_per_step * self.group_size
        if num_sequences > MOST_SEQUENCES:
            raise PlanError(
                f"{counted(self.num_steps, 'step')} of {self.groups_per_step} x "
                f"{counted(self.group_size, 'trajectory')} are "
                f"{num_sequences:,}",
                f"simulate at most {MOST_SEQUENCES:,}: fewer --steps, or a part of --prompts on a part of --num-gpus",
            )
        if self.slots_per_replica > self.decode.num_slots:
            raise PlanError(
                f"slots_per_replica is {self.slots_per_replica}, the decode table has {self.decode.num_slots}",
                "tabulate the decode step up to the number of slots",
            )
        if self.groups_per_step % self.sync_every:
            raise PlanError(
                f"--sync-every is {self.sync_every} and does not divide the {self.groups_per_step} --prompts of a step",
                "give a --sync-every that divides them: every update between two publications takes as many groups",
            )
        if self.take not in ("admission", "arrival") or self.on_stale not in ("drop", "wait"):
            raise PlanError(
                f"--take is {self.take!r} and --on-stale is {self.on_stale!r}",
                "give --take admission or arrival, and --on-stale drop or wait",
            )
        if self.on_publish not in ("keep", "drain", "abort"):
            raise PlanError(f"--on-publish is {self.on_publish!r}", "give --on-publish keep, drain or abort")
        if self.num_warmup_steps >= self.num_steps:
            raise PlanError(
                f"num_warmup_steps is {self.num_warmup_steps} of {counted(self.num_steps, 'step')}",
                "simulate more steps than are left out of the averages",
            )

    @property
    def num_collects(self) -> int:
        """Portions in which a step's groups reach the trainer."""
        return self.sync_every if self.mode == "separate_async" else 1

    @property
    def staleness_bound(self) -> int:
        return self.max_staleness_steps if self.mode in ("colocate_async", "separate_async") else 0


MOST_SEQUENCES = 5_000_000
"""Trajectories of one simulation: a few minutes of it."""
_AT_LEAST_ONE = (
    "num_replicas", "slots_per_replica", "groups_per_step", "group_size", "num_steps", "sync_every",
)  # fmt: skip
_NOT_NEGATIVE = (
    "prompt_tokens", "prefill_token_s", "observation_tokens", "forward_s", "train_s", "switch_s", "gather_s",
    "sync_pause_s", "replica_recovery_s", "judge_s", "max_staleness_steps", "num_lent_replicas", "lend_switch_s",
    "trajectory_failure_frac", "seed", "num_warmup_steps",
)  # fmt: skip
