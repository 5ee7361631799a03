"""Training GPUs that wait form replicas of their own: the pace of an asynchronous step in closed form.

    trainer    t training, then it waits  ─► switch ─► x of generation ─► switch back ─► the next t
    rollout    generates all the time at r1 steps a second, and together with the lent GPUs at r2

A step's work is done when (t + 2 switch) r1 + x r2 = 1, so x = (1 - (t + 2 switch) r1) / r2 and the step takes
t + 2 switch + x. GPUs are lent where the wait is longer than two switches both ways, as the simulator does it. That
sequences lose their KV when the lent GPUs go back, it charges and this does not.
"""

from __future__ import annotations

from dataclasses import replace

from rollbook.ledger.account import RolloutSide, StepAccount
from rollbook.observe.numbers import counted
from rollbook.planner.words import seconds


def with_lending(account: StepAccount, together: RolloutSide, *, switch_s: float) -> StepAccount:
    """`account` of separated asynchronous sides whose training GPUs are lent while they wait.

    Args:
        together: generation on the rollout GPUs and the lent ones.
        switch_s: seconds to turn training GPUs into replicas, and again back.
    """
    beside_s = account.seconds.prefill + account.seconds.reward
    alone_s = beside_s + account.seconds.generate_throughput
    together_s = together.prefill_s + together.reward_s + (together.steady_s or together.throughput_s)
    train_s = account.train.total_s
    lent_gpus = together.num_gpus - account.rollout.num_gpus
    if lent_gpus < 1 or alone_s - train_s <= 4 * switch_s:
        return account
    own_s = train_s + 2 * switch_s
    lent_s = (1 - own_s / alone_s) * together_s
    pace_s = own_s + lent_s
    total_s = account.seconds.total - max(alone_s, train_s) + pace_s
    share = total_s / account.seconds.total
    span = account.step_s
    busy = account.rollout.used_gpus / account.rollout.num_gpus * pace_s / total_s
    lent_share = lent_gpus / account.train.num_gpus
    return replace(
        account,
        seconds=replace(account.seconds, generate_throughput=pace_s - beside_s, total=total_s),
        mfu_frac=account.mfu_frac / share,
        idle_frac={
            "rollout": max(1 - busy, 0.0),
            "train": 1 - (train_s + lent_share * lent_s) / total_s,
        },
        step_s=replace(span, value=total_s, low=span.low * share, high=span.high * share),
        notes=(
            *account.notes,
            f"{counted(lent_gpus, 'training GPU')} generate{'s' if lent_gpus == 1 else ''} for "
            f"{seconds(lent_s)} of a step, between two switches of "
            f"{seconds(switch_s)}",
        ),
    )
