"""Where the peak of the GPUs goes: one share for every loss, and what is left is the whole-step MFU.

A stage that holds n GPUs for t seconds takes n t of the step's GPU time; what it computes at peak rate is
useful, the rest is lost to that stage. What neither a stage nor the loop between them holds is waiting. The
shares and the MFU add up to one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollbook.ledger.account import StepAccount
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.step import is_colocated
from rollbook.observe.numbers import counted
from rollbook.planner.words import percent, seconds

BETWEEN = "between the stages"
"""The loss that no stage is to blame for, under the name that the table of stages gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One step down the waterfall."""

    loss: str
    frac: float
    """Of the peak FLOPs of all GPUs over the step."""
    gpu_s: float
    """GPU time that the stage holds, useful or not."""
    why: str

    def as_json(self) -> dict[str, object]:
        return {"loss": self.loss, "frac": self.frac, "gpu_s": self.gpu_s, "why": self.why}


def waterfall(account: StepAccount, cluster: Cluster) -> list[Loss]:
    """Losses of one step, largest first; their sum is 1 - `account.mfu_frac`."""
    peak = cluster.accelerator.peak("bfloat16")
    total_gpu_s = account.seconds.total * account.num_gpus
    s, f = account.seconds, account.flops
    rollout, train = account.rollout, account.train
    everyone = account.num_gpus
    stages = [
        ("decode", s.generate_throughput * rollout.used_gpus, f.generate, _why_decode(account, peak)),
        ("tail", s.generate_tail * rollout.used_gpus, 0.0, _why_tail(account)),
        ("prefill", s.prefill * rollout.used_gpus, f.prefill, "prompts pass at less than peak"),
        (
            "forward",
            s.forward * train.num_gpus,
            f.reference + f.proximal + f.critic_values + (0.0 if s.reward else f.reward_model),
            "logprob passes reach a part of peak: memory-bound operators, exchange, padding",
        ),
        (
            "train",
            s.train * train.num_gpus,
            f.train + f.critic - f.critic_values,
            f"training itself reaches {percent(train.mfu_frac)} of peak: recomputation, memory-bound "
            "operators, exchange, optimizer",
        ),
        (
            "switch",
            s.switch * everyone,
            0.0,
            f"hand-overs between engine and trainer take {seconds(s.switch)}",
        ),
        (
            "sync",
            0.0 if account.overlaps_sync else s.sync * everyone,
            0.0,
            f"publishing the weights takes {seconds(s.sync)}",
        ),
        (
            "reward",
            s.reward * rollout.used_gpus,
            f.reward_model if s.reward else 0.0,
            f"the engines read every trajectory and write its verdict for {seconds(s.reward)}",
        ),
        (
            "environment",
            0.0 if account.mode == "separate_async" else s.env * everyone,
            0.0,
            f"environments hold up the step by {seconds(s.env)}",
        ),
        (
            BETWEEN,
            s.other * everyone,
            0.0,
            f"rewards by rule, data, logging and scheduling take {seconds(s.other)} in which no GPU works",
        ),
        (
            "bound",
            account.bound_s * everyone,
            0.0,
            f"the longest responses of a batch hold up the step by {seconds(account.bound_s)}: the staleness bound "
            "lets nothing newer take their place",
        ),
    ]
    losses = [
        Loss(loss=name, frac=(gpu_s * peak - flops) / (total_gpu_s * peak), gpu_s=gpu_s, why=why)
        for name, gpu_s, flops, why in stages
        if gpu_s > 0
    ]
    waiting = 1 - account.mfu_frac - sum(loss.frac for loss in losses)
    if waiting > 1e-6:
        losses.append(
            Loss(loss="waiting", frac=waiting, gpu_s=waiting * total_gpu_s, why=_why_waiting(account))
        )
    return _without_gains(sorted(losses, key=lambda loss: -loss.frac))


def above_peak(account: StepAccount, cluster: Cluster) -> list[str]:
    """Stages that compute faster than the bfloat16 peak: float8 engines may, a model without a roof does."""
    peak = cluster.accelerator.peak("bfloat16") * account.rollout.num_gpus
    s, f = account.seconds, account.flops
    rates = {"decode": (s.generate_throughput, f.generate), "prefill": (s.prefill, f.prefill)}
    return [
        name for name, (value_s, flops) in rates.items() if value_s > 0 and flops > value_s * peak * 1.001
    ]


def _without_gains(losses: list[Loss]) -> list[Loss]:
    """A stage above the bfloat16 peak loses nothing; what it gains shortens the largest loss, so sums hold."""
    gains = sum(loss.frac for loss in losses if loss.frac < 0)
    kept = [loss for loss in losses if loss.frac >= 0]
    if gains and kept:
        kept[0] = replace(kept[0], frac=kept[0].frac + gains)
    return kept


def _why_decode(account: StepAccount, peak: float) -> str:
    rollout, s = account.rollout, account.seconds
    held_s = (s.generate_throughput + s.generate_tail) * rollout.used_gpus
    return (
        f"a decode step reads weights and KV from memory to make {counted(rollout.slots_per_replica, 'token')} in "
        f"{seconds(rollout.decode_step_s)}: with the tail "
        f"{percent(account.flops.generate / (held_s * peak))} of peak"
    )


def _why_tail(account: StepAccount) -> str:
    return (
        f"the last responses run almost alone for {seconds(account.seconds.generate_tail)}, "
        f"{percent(account.tail_frac)} of generation"
    )


def _why_waiting(account: StepAccount) -> str:
    rollout, reasons = account.rollout, []
    if not is_colocated(account.mode):
        reasons.append(_why_sides_wait(account))
    if left_over := rollout.num_gpus - rollout.used_gpus:
        reasons.append(
            f"{left_over} of {counted(rollout.num_gpus, 'rollout GPU')} belong{'s' if left_over == 1 else ''} "
            f"to no replica of {rollout.tp_size}"
        )
    return "; ".join(reasons)


def _why_sides_wait(account: StepAccount) -> str:
    s, train_s = account.seconds, account.train.total_s
    rollout_s = s.prefill + s.generate_throughput + s.generate_tail + s.reward
    if account.mode == "separate_sync":
        return (
            f"each side waits for the other: rollout GPUs while the others train for {seconds(train_s)}, "
            "training GPUs "
            f"while they generate for {seconds(rollout_s)}"
        )
    if rollout_s < train_s:
        return (
            f"generation needs {seconds(rollout_s)} and training {seconds(train_s)}: engines that are ahead run the "
            "longest responses alone or idle"
        )
    return f"training needs {seconds(train_s)} and generation {seconds(rollout_s)}: the training GPUs idle in between"
