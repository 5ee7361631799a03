"""What one step's trajectories say: lengths, rewards by source, failures, staleness, the engines' counters.

Names, units and denominators stand in `observe/catalogue.py`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from rollbook.algos.shaping import RAW_SCORE
from rollbook.buffer.buffer import GroupBuffer, GroupState, Taken
from rollbook.observe.values import Last, Low, Peak, Ratio, Total, Value, Values
from rollbook.rollout.engine import COUNTERS, EngineStats
from rollbook.types import TrainBatch, Trajectory

MAX_MESSAGE = 1000
"""Characters kept of a failure's own words."""


def spread(name: str, numbers: Sequence[float], statistics: Sequence[str] = ("mean", "max", "min")) -> Values:
    """`name/mean`, `name/p99`, ... of the numbers; nothing when there are none."""
    if not len(numbers):
        return {}
    array = np.asarray(numbers, np.float64)
    made: dict[str, Value] = {
        "mean": Ratio(float(array.sum()), len(array)),
        "max": Peak(float(array.max())),
        "min": Low(float(array.min())),
    }
    for statistic in statistics:
        if statistic.startswith("p"):
            made[statistic] = Last(float(np.quantile(array, int(statistic[1:]) / 100)))
    return {f"{name}/{statistic}": made[statistic] for statistic in statistics}


def trajectory_values(taken: Taken, failed: Iterable[Trajectory]) -> Values:
    """Lengths and rewards of what is trained, of all that finished, and the failures.

    `critic/...` and `response_length/...` are of trained trajectories; `reward/<source>/...` and `generated/...` of
    all finished ones, so that a filter which drops flat groups does not change what the reward curve means.
    """
    failed = list(failed)
    trained = [t for group in taken.groups for t in group.scored]
    finished = trained + [t for group in taken.dropped for t in group.scored]
    rewards = [t.reward for t in trained if t.reward is not None]
    spreads = ("mean", "p50", "p99", "max", "min")
    values = spread("response_length", [t.num_response_tokens for t in trained], spreads)
    values |= spread("generated/response_length", [t.num_response_tokens for t in finished], spreads)
    values |= spread("prompt_length", [len(t.prompt.prompt_ids) for t in trained])
    values |= spread("num_turns", [len(t.turns) for t in finished])
    values |= spread(
        "env/turn_s", [s for t in finished for s in t.env_turns_s], ("mean", "p50", "p99", "max")
    )
    values |= spread("critic/rewards", rewards)
    values |= spread("critic/score", [t.reward_terms.get(RAW_SCORE, t.reward or 0.0) for t in trained])
    values |= {
        "response_length/clip_ratio": Ratio(sum(t.is_truncated for t in trained), len(trained)),
        "generated/clip_ratio": Ratio(sum(t.is_truncated for t in finished), len(finished)),
        "generated/num_trajectories": Total(len(finished)),
        "failures/num": Total(len(failed)),
        "failures/frac": Ratio(len(failed), len(failed) + len(finished)),
        "response/aborted_ratio": Ratio(len(failed), len(failed) + len(finished)),
    }
    values |= _reward_by_source(finished, failed)
    return values | _tail(finished)


def untrained_events(taken: Taken, failed: Iterable[Trajectory]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kind and fields of an event for every group that left untrained, and for every kind of failure by source."""
    for eviction in taken.evictions:
        yield "eviction", asdict(eviction)
    alike: dict[tuple[str, str], list[Trajectory]] = defaultdict(list)
    for trajectory in failed:
        if trajectory.failure is not None:
            alike[trajectory.failure.kind, trajectory.prompt.source].append(trajectory)
    for (kind, source), trajectories in alike.items():
        first, failure = trajectories[0], trajectories[0].failure
        assert failure is not None
        yield (
            "failure",
            {
                "failure": str(kind),
                "source": source,
                "num_trajectories": len(trajectories),
                "group_id": first.group_id,
                "member_idx": first.member_idx,
                "turn_idx": failure.turn_idx,
                "message": failure.message[:MAX_MESSAGE],
            },
        )


def _reward_by_source(scored: Sequence[Trajectory], failed: Sequence[Trajectory]) -> Values:
    values: Values = {}
    by_source: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in scored:
        by_source[trajectory.prompt.source].append(trajectory)
    num_failed = Counter(t.prompt.source for t in failed)
    for source in by_source.keys() | num_failed.keys():
        own = by_source[source]
        rewards = np.array([t.reward for t in own], np.float64)
        values[f"reward/{source}/mean"] = Ratio(float(rewards.sum()), len(own))
        values[f"reward/{source}/zero_frac"] = Ratio(float((rewards == 0).sum()), len(own))
        values[f"reward/{source}/num_scored"] = Total(len(own))
        values[f"reward/{source}/num_failed"] = Total(num_failed[source])
        if len(own):
            values[f"reward/{source}/std"] = Last(float(rewards.std()))
        for term in sorted({name for t in own for name in t.reward_terms}):
            parts = [t.reward_terms[term] for t in own if term in t.reward_terms]
            values[f"reward/{source}/term/{term}"] = Ratio(sum(parts), len(parts))
    kinds = Counter((t.failure.kind.value, t.prompt.source) for t in failed if t.failure is not None)
    for (kind, source), count in kinds.items():
        values[f"failures/{kind}/{source}/num"] = Total(count)
    for kind, count in Counter(t.failure.kind.value for t in failed if t.failure is not None).items():
        values[f"failures/{kind}/num"] = Total(count)
    return values


def _tail(scored: Sequence[Trajectory]) -> Values:
    ends = np.sort([t.finished_at_s for t in scored])
    if len(ends) < 10:
        return {}
    return {"rollout/tail_s": Last(float(ends[-1] - ends[int(0.9 * len(ends))]))}


def staleness_values(taken: Taken) -> Values:
    """How old the trained tokens were in steps, and what was evicted for it."""
    scored = [t for group in taken.groups for t in group.scored]
    prefix = "training/off_policy"
    values = spread(f"{prefix}/trajectory_staleness", [taken.staleness(t.newest_version) for t in scored])
    values |= spread(
        f"{prefix}/trajectory_staleness_worst", [taken.staleness(t.oldest_version) for t in scored]
    )
    values |= spread(f"{prefix}/trajectory_spans", [t.newest_version - t.oldest_version + 1 for t in scored])
    for group, staleness in zip(taken.groups, taken.staleness_steps, strict=True):
        name = f"{prefix}/staleness_hist/{staleness}"
        held = values.get(name, Total(0))
        assert isinstance(held, Total)
        values[name] = held + Total(len(group.scored))
    values["rollout/num_continued"] = Total(sum(t.newest_version > t.oldest_version for t in scored))
    stale = [e for e in taken.evictions if e.reason == "stale"]
    values[f"{prefix}/evicted_samples"] = Total(len(stale))
    values |= spread(f"{prefix}/evicted_samples_staleness", [e.staleness_steps for e in stale])
    evicted = Counter(e.reason for e in taken.evictions)
    values |= {f"evicted/{reason}/num_groups": Total(count) for reason, count in evicted.items()}
    num_filtered = evicted.total() - evicted["stale"]
    values["filter/kept_frac"] = Ratio(len(taken.groups), len(taken.groups) + num_filtered)
    if stale and taken.groups:
        lost = float(np.mean([e.num_response_tokens for e in stale]))
        kept = float(np.mean([sum(t.num_response_tokens for t in g.trajectories) for g in taken.groups]))
        values["evicted/response_length/mean"] = Ratio(lost, 1)
        values["evicted/length_bias"] = Last(lost / kept if kept else float("nan"))
    return values


def batch_values(batch: TrainBatch) -> Values:
    """Sizes of what was trained, and how much of it carried a signal."""
    with_signal = sum(bool((s.advantages != 0).any()) for s in batch.sequences if s.advantages is not None)
    return {
        "perf/total_num_tokens": Total(batch.num_tokens),
        "batch/num_sequences": Total(len(batch.sequences)),
        "batch/num_loss_tokens": Total(batch.num_loss_tokens),
        "batch/effective_frac": Ratio(with_signal, len(batch.sequences)),
    }


def teacher_values(batch: TrainBatch) -> Values:
    """How far the sampled policy is from its teacher."""
    gaps = [
        (s.behavior_logprobs - s.teacher_logprobs)[s.action_mask].sum(dtype=np.float64)
        for s in batch.sequences
        if s.teacher_logprobs is not None
    ]
    num_tokens = sum(int(s.action_mask.sum()) for s in batch.sequences)
    return {"actor/teacher_kl_k1": Ratio(float(sum(gaps)), num_tokens)}


def buffer_values(buffer: GroupBuffer) -> Values:
    """The account of groups: admitted = running + finished + failed + trained + evicted."""
    values: Values = {f"buffer/num_{state.value}": Last(buffer.counts[state]) for state in GroupState}
    values["buffer/num_admitted"] = Last(buffer.num_admitted)
    values["buffer/capacity"] = Last(buffer.capacity())
    return values


def engine_values(
    before: Mapping[int, EngineStats],
    after: Mapping[int, EngineStats],
    *,
    elapsed_s: float,
    out_of_service: Collection[int] = (),
) -> Values:
    """Differences of the engines' counters over a step, and their gauges now. What a gauge would say of running
    sequences and of the KV pool, once a step's sequences have ended, is 0: those are means over the decode steps."""
    values: Values = {
        "replica/num_serving": Last(len(after) - len(out_of_service)),
        "replica/num_quarantined": Last(len(out_of_service)),
    }
    versions = [s.weight_version for replica_id, s in after.items() if replica_id not in out_of_service]
    if versions:
        values["sync/version_spread"] = Last(max(versions) - min(versions))
    if any(stats.mismatch != "none" for stats in after.values()):
        values["rollout/mismatch_error_frac"] = Peak(max(s.mismatch_error_frac for s in after.values()))
    total: Counter[str] = Counter()
    fullest = 0.0
    for replica_id, now in after.items():
        then = before.get(replica_id)
        delta = _difference(then, now)
        total.update(delta)
        busy_s = delta["busy_s"]
        prefix = f"replica/{replica_id}"
        kv_used_frac = delta["kv_used_tokens_sum"] / max(delta["decode_steps"] * now.kv_pool_tokens, 1)
        fullest = max(fullest, kv_used_frac)
        values |= {
            f"{prefix}/weight_version": Last(now.weight_version),
            f"{prefix}/num_running": Last(delta["active_slots_sum"] / max(delta["decode_steps"], 1)),
            f"{prefix}/num_waiting": Last(now.num_waiting),
            f"{prefix}/tokens_per_s": Ratio(delta["decode_tokens"], busy_s),
            f"{prefix}/kv_used_frac": Last(kv_used_frac),
            f"{prefix}/num_preemptions": Total(delta["num_preemptions"]),
            f"{prefix}/idle_frac": Ratio(max(elapsed_s - busy_s, 0.0), elapsed_s),
        }
    num_slots = sum(stats.num_slots for stats in after.values()) / max(len(after), 1)
    prompt_tokens = total["prefill_tokens"] + total["cached_prompt_tokens"]
    return values | {
        "rollout/mean_batch": Ratio(total["active_slots_sum"], total["decode_steps"]),
        "rollout/slots_used_frac": Ratio(total["active_slots_sum"], total["decode_steps"] * num_slots),
        "rollout/kv_used_frac": Peak(fullest),
        "rollout/decode_step_s": Ratio(total["decode_s"], total["decode_steps"]),
        "rollout/prefill_tokens": Total(total["prefill_tokens"]),
        "rollout/prefix_hit_frac": Ratio(total["cached_prompt_tokens"], prompt_tokens),
        "rollout/num_preemptions": Total(total["num_preemptions"]),
        "generated/num_tokens": Total(total["decode_tokens"]),
    }


def idle_values(values: Values, *, computed_s: float, elapsed_s: float, shares_device: bool) -> Values:
    """`idle_frac/<side>`, as the ledger counts it: hand-overs, publications and the host's own work are idle, and
    devices that both sides share are idle together.

    Args:
        values: the engines', of the same seconds.
        computed_s: seconds of the trainer's forward passes and updates.
    """
    idle = [v.result() for name, v in values.items() if re.fullmatch(r"replica/\d+/idle_frac", name)]
    generated_s = elapsed_s * (1.0 - sum(idle) / len(idle)) if idle else 0.0
    busy_s = {"rollout": generated_s, "train": computed_s}
    if shares_device:
        busy_s = dict.fromkeys(busy_s, generated_s + computed_s)
    return {f"idle_frac/{side}": Ratio(max(elapsed_s - s, 0.0), elapsed_s) for side, s in busy_s.items()}


def _difference(then: EngineStats | None, now: EngineStats) -> Counter[str]:
    delta: Counter[str] = Counter()
    for name in COUNTERS:
        delta[name] = getattr(now, name) - (getattr(then, name) if then is not None else 0)
    return delta
