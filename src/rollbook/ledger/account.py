"""The account of one step, and its two sides.

    RolloutSide   what generation costs on a number of GPUs      (does not know the training side)
    TrainSide     what forwards and training cost on a number of GPUs
    StepAccount   both under one mode: sums, overlaps, memory, utilisation

The sides are separate so that a search over splits computes each only once per number of GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from rollbook.ledger.hardware import Cluster
from rollbook.ledger.workload import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A prediction and the interval that should hold it in nine cases of ten."""

    value: float
    low: float
    high: float

    @classmethod
    def within(cls, value: float, error_frac: float) -> Range:
        """`value` with a factor of 1 + `error_frac` both ways."""
        return cls(value=value, low=value / (1 + error_frac), high=value * (1 + error_frac))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """FLOPs of one step, without recomputation."""

    generate: float
    prefill: float
    reference: float
    proximal: float
    reward_model: float
    train: float
    critic: float
    """Values before training, and training."""
    num_epochs: int = 1
    recomputed: float = 0.0
    """Forwards repeated for the backward where whole layers are recomputed: done, and counted in no total."""

    @property
    def critic_values(self) -> float:
        """The critic's forward before training: one of its 1 + 3 epochs passes."""
        return self.critic / (1 + 3 * self.num_epochs)

    @property
    def total(self) -> float:
        return (
            self.generate
            + self.prefill
            + self.reference
            + self.proximal
            + self.reward_model
            + self.train
            + self.critic
        )

    def as_json(self) -> dict[str, float]:
        """The keys of `plan --json`."""
        beside = ("num_epochs", "recomputed")
        stages = {name: value for name, value in asdict(self).items() if name not in beside}
        return {**stages, "total": self.total}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAccount:
    """Prefill of one step. A replica's numbers are those with all slots running."""

    tokens: float
    """That all replicas prefill together."""
    shared_tokens: float
    """That groups save by sharing the prefill of their prompt."""
    chunk_tokens: float
    """Of prompts in one step beside the running sequences; 0: prompts whole."""
    num_mixed_steps: float
    """Decode steps of a replica that carry a chunk."""
    plain_step_s: float
    mixed_step_s: float
    """0: prompts whole, no step is mixed."""
    seconds: float
    """That prefill adds to a replica's step."""

    @property
    def stretch(self) -> float:
        """By how much a mixed step is longer than a plain one: what a running response feels of prompts."""
        return self.mixed_step_s / self.plain_step_s if self.mixed_step_s else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSide:
    """Generation of one step on `num_gpus` devices."""

    num_gpus: int
    tp_size: int
    num_replicas: int
    slots_per_replica: int
    num_waves: int
    decode_step_s: float
    """One step of a replica with its slots full."""
    throughput_s: float
    """Decoding while the slots are full."""
    tail_s: float
    """Decoding while they drain."""
    busy_s: float = 0.0
    """Decoding of the average replica: some end before the slowest; 0: all run to the end."""
    steady_s: float = 0.0
    """Decoding when new prompts always fill the freed slots; 0: as `throughput_s`."""
    prefill_s: float
    prefill: PrefillAccount | None = None
    """None under the paper account."""
    tokens_per_s_per_gpu: float
    """Response tokens, slots full."""
    mfu_frac: float
    """Of a full decode step."""
    weights_bytes_per_gpu: float
    kv_pool_bytes: float
    """Of one replica."""
    reward_s: float = 0.0
    """A generative reward model reading and judging every trajectory on the same devices."""
    judge_bytes_per_gpu: float = 0.0
    """Of the weights, those of a reward model that writes its verdict."""
    env_wait_s: float = 0.0
    """Seconds that agents' environments add to a step that waits for its last trajectory: the slow tail of both."""
    error_frac: float = 0.0
    why_not: tuple[str, ...] = ()
    """Reasons why this cannot run; empty when it fits."""
    notes: tuple[str, ...] = ()

    @property
    def generate_s(self) -> float:
        return self.throughput_s + self.tail_s

    @property
    def used_gpus(self) -> int:
        """Devices that belong to a replica; the rest of the side is left over by its layout and idles."""
        return min(self.num_replicas * self.tp_size, self.num_gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSide:
    """Forwards, training and the critic of one step on `num_gpus` devices."""

    num_gpus: int
    forward_s: float
    """Reference, proximal, reward model, the critic's values."""
    train_s: float
    train_state_bytes_per_gpu: float
    reference_bytes_per_gpu: float
    critic_state_bytes_per_gpu: float = 0.0
    reward_model_bytes_per_gpu: float = 0.0
    activation_bytes_per_gpu: float = 0.0
    mfu_frac: float = 0.0
    """Of training alone."""
    error_frac: float = 0.0
    why_not: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def total_s(self) -> float:
        return self.forward_s + self.train_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Stages of one step. In the asynchronous separated mode both sides overlap: `total` is no sum."""

    generate_throughput: float
    generate_tail: float
    prefill: float
    forward: float
    train: float
    switch: float
    sync: float
    env: float
    reward: float
    other: float
    """Rewards, data, logging, scheduling."""
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAccount:
    """What one step costs under one mode."""

    mode: Mode
    num_gpus: int
    rollout: RolloutSide
    train: TrainSide
    flops: Flops
    seconds: Seconds
    memory: dict[str, float]
    mfu_frac: float
    """FLOPs of the step over its seconds and the bfloat16 peak of all GPUs."""
    tail_frac: float
    """Share of generation spent in the tail."""
    idle_frac: dict[str, float]
    """Share of the step in which a device of the side, those left over included, neither generates (or judges) nor
    computes a forward or an update: "rollout", "train". Hand-overs and publications count as idle; shared devices are
    idle together. The simulation counts alike: while environments work, engines stand only where no trajectory of a
    replica decodes."""
    step_s: Range
    overlaps_sync: bool = False
    """Both sides go on during a publication: its seconds are no part of the step's."""
    bound_s: float = 0.0
    """Of the step's seconds: what the staleness bound adds to the pace of both sides."""
    stage_error_frac: Mapping[str, float] = field(default_factory=dict)
    """Of each stage's seconds; 0 where an account claims no more than its arithmetic."""
    why_not: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        return not self.why_not

    def _ranges(self) -> dict[str, list[float]]:
        """Low and high of every stage, each with the error of its own model."""
        ranges = {"total": self.step_s}
        for name, value in asdict(self.seconds).items():
            if name != "total":
                ranges[name] = Range.within(value, self.stage_error_frac.get(name, 0.0))
        return {name: [found.low, found.high] for name, found in ranges.items()}

    def as_json(self) -> dict[str, object]:
        """The "step" object of `plan --json`."""
        rollout = self.rollout
        return {
            "mode": self.mode,
            "num_rollout_gpus": rollout.num_gpus,
            "num_train_gpus": self.train.num_gpus,
            "flops": self.flops.as_json(),
            "recomputed_flops": self.flops.recomputed,
            "seconds": asdict(self.seconds),
            "seconds_range": self._ranges(),
            "decode": {
                "tp_size": rollout.tp_size,
                "num_replicas": rollout.num_replicas,
                "slots_per_replica": rollout.slots_per_replica,
                "num_waves": rollout.num_waves,
                "decode_step_s": rollout.decode_step_s,
                "tokens_per_s_per_gpu": rollout.tokens_per_s_per_gpu,
                "mfu_frac": rollout.mfu_frac,
            },
            "prefill": _prefill_json(rollout.prefill),
            "memory": dict(self.memory),
            "mfu_frac": self.mfu_frac,
            "tail_frac": self.tail_frac,
            "idle_frac": dict(self.idle_frac),
            "step_s_range": [self.step_s.low, self.step_s.high],
            "bound_s": self.bound_s,
            "fits": self.fits,
            "why_not": list(self.why_not),
            "notes": list(self.notes),
        }


def _prefill_json(prefill: PrefillAccount | None) -> dict[str, object] | None:
    return None if prefill is None else {**asdict(prefill), "stretch": prefill.stretch}


def combine(
    mode: Mode,
    *,
    cluster: Cluster,
    rollout: RolloutSide,
    train: TrainSide,
    flops: Flops,
    memory: dict[str, float],
    switch_s: float,
    sync_s: float,
    overlaps_sync: bool = True,
    other_s: float = 0.0,
    sync_error_frac: float = 0.0,
    widening: float = 1.0,
    notes: tuple[str, ...] = (),
) -> StepAccount:
    """Put two sides under a mode.

    `sync` and `colocate_async` share their devices, so the stages add up and each hand-over costs `switch_s`;
    the asynchronous one continues unfinished responses in the next step and has no tail. `separate_sync` runs
    one side after the other. `separate_async` runs both at once: the step is the larger side, the tail is
    filled by the next step's prompts, and weights are published while both work.

    Args:
        overlaps_sync: False where the asynchronous engines stand still during a publication.
        other_s: added to every step.
        sync_error_frac: of `switch_s` and `sync_s`.
        widening: on the error of the whole step, beyond those of its stages.
        notes: beside those of both sides.
    """
    waits_for_all = mode in ("sync", "separate_sync")
    tail_s = rollout.tail_s if waits_for_all else 0.0
    throughput_s = rollout.throughput_s if waits_for_all else rollout.steady_s or rollout.throughput_s
    # Where unfinished trajectories go on in the next step, environments work beside the trainer.
    env_s = rollout.env_wait_s if mode != "colocate_async" else 0.0
    switch_s = switch_s if mode in ("sync", "colocate_async") else 0.0
    rollout_s = rollout.prefill_s + throughput_s + tail_s + rollout.reward_s
    # Replicas that end early wait for the slowest, and GPUs left over by the layout never work.
    early_s = throughput_s + tail_s - rollout.busy_s if waits_for_all and rollout.busy_s else 0.0
    held_s = (rollout_s - early_s) * rollout.used_gpus / rollout.num_gpus
    if mode == "separate_async":
        total = max(rollout_s, train.total_s) + (0.0 if overlaps_sync else sync_s) + other_s
        if rollout.busy_s and train.total_s > rollout_s:
            # Engines ahead of the trainer drain before the next prompts are admitted: few sequences run for longer.
            drained_s = rollout.prefill_s + rollout.busy_s + rollout.reward_s
            held_s = min(max(drained_s, rollout_s), train.total_s) * rollout.used_gpus / rollout.num_gpus
        idle = {"rollout": 1 - held_s / total, "train": 1 - train.total_s / total}
        num_gpus = rollout.num_gpus + train.num_gpus
    elif mode == "separate_sync":
        total = rollout_s + env_s + train.total_s + sync_s + other_s
        idle = {"rollout": 1 - held_s / total, "train": 1 - train.total_s / total}
        num_gpus = rollout.num_gpus + train.num_gpus
    else:
        total = rollout_s + env_s + train.total_s + switch_s + sync_s + other_s
        waiting = 1 - (held_s + train.total_s) / total
        idle = {"rollout": waiting, "train": waiting}
        num_gpus = max(rollout.num_gpus, train.num_gpus)
    generate_s = throughput_s + tail_s
    parts = (
        (rollout.error_frac, rollout_s),
        (train.error_frac, train.total_s),
        (sync_error_frac, switch_s + sync_s + other_s),
    )
    error_frac = sum(error * part for error, part in parts) / sum(part for _, part in parts)
    return StepAccount(
        mode=mode,
        num_gpus=num_gpus,
        rollout=rollout,
        train=train,
        flops=flops,
        seconds=Seconds(
            generate_throughput=throughput_s,
            generate_tail=tail_s,
            prefill=rollout.prefill_s,
            forward=train.forward_s,
            train=train.train_s,
            switch=switch_s,
            sync=sync_s,
            env=env_s,
            reward=rollout.reward_s,
            other=other_s,
            total=total,
        ),
        memory=memory,
        mfu_frac=flops.total / (total * num_gpus * cluster.accelerator.peak("bfloat16")),
        tail_frac=tail_s / generate_s if generate_s else 0.0,
        idle_frac=idle,
        step_s=Range.within(total, error_frac * widening),
        overlaps_sync=mode == "separate_async" and overlaps_sync,
        stage_error_frac={
            **dict.fromkeys(
                ("generate_throughput", "generate_tail", "prefill", "env", "reward"), rollout.error_frac
            ),
            **dict.fromkeys(("forward", "train"), train.error_frac),
            **dict.fromkeys(("switch", "sync", "other"), sync_error_frac),
        },
        why_not=rollout.why_not + train.why_not,
        notes=(*rollout.notes, *train.notes, *notes),
    )
