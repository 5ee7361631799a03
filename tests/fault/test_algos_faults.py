"""Reported faults of advantages, losses and filters, as their cases say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from rollbook.algos.advantage import estimate_advantages, gae
from rollbook.algos.aggregate import AGGREGATIONS, aggregate, loss_counts
from rollbook.algos.config import AlgorithmConfig, FilterConfig, OverlongConfig
from rollbook.algos.filters import drop_reason, fresh_sequences, is_flat, train_sequences
from rollbook.algos.policy import PolicyTensors, policy_objective
from rollbook.algos.shaping import shape_rewards
from rollbook.errors import DataError
from rollbook.types import (
    Failure,
    FailureKind,
    FinishReason,
    Group,
    Prompt,
    TrainSequence,
    Trajectory,
    Turn,
    VersionRun,
)

GRPO = AlgorithmConfig(name="grpo", scale="none")


def prompt(prompt_id: str = "row-0") -> Prompt:
    return Prompt(prompt_id=prompt_id, prompt_ids=np.array([1, 2], np.int32), source="test")


def trajectory(
    reward: float | FailureKind,
    *,
    group_id: int = 0,
    member_idx: int = 0,
    num_tokens: int = 3,
    is_truncated: bool = False,
    prompt_id: str = "row-0",
) -> Trajectory:
    turn = Turn(
        response_ids=np.full(num_tokens, 7, np.int32),
        behavior_logprobs=np.full(num_tokens, -1.0, np.float32),
        version_runs=(VersionRun(0, num_tokens),),
        finish_reason=FinishReason.LENGTH if is_truncated else FinishReason.STOP,
    )
    made = Trajectory(group_id=group_id, member_idx=member_idx, prompt=prompt(prompt_id), turns=(turn,))
    if isinstance(reward, FailureKind):
        made.failure = Failure(kind=reward, message="injected")
    else:
        made.reward = reward
    return made


def group(group_id: int, rewards: list[float | FailureKind], prompt_id: str = "row-0") -> Group:
    members = [
        trajectory(r, group_id=group_id, member_idx=i, prompt_id=prompt_id) for i, r in enumerate(rewards)
    ]
    return Group(group_id=group_id, prompt=prompt(prompt_id), trajectories=tuple(members))


def token_advantages(sequences: list[TrainSequence]) -> list[float]:
    """The advantage of each sequence's first action token."""
    estimate_advantages(sequences, GRPO)
    return [float(s.advantages[s.action_mask][0]) for s in sequences if s.advantages is not None]


@pytest.mark.parametrize(
    "cause",
    [FailureKind.ENGINE, FailureKind.REWARD, FailureKind.TIMEOUT, FailureKind.SANDBOX_LOST],
)
def test_br047_a_failure_takes_part_in_no_baseline(cause: FailureKind) -> None:
    sequences = train_sequences([group(0, [1.0, 1.0, 1.0, cause])], FilterConfig())
    assert [s.member_idx for s in sequences] == [0, 1, 2]
    assert token_advantages(sequences) == [0.0, 0.0, 0.0]


def test_br047_a_real_zero_does() -> None:
    """Mean 0.75."""
    sequences = train_sequences([group(0, [1.0, 1.0, 1.0, 0.0])], FilterConfig())
    assert token_advantages(sequences) == [0.25, 0.25, 0.25, -0.75]


def test_br047_a_group_is_kept_while_one_member_was_scored() -> None:
    """By cause, failures are counted where a step reports: `test_controller_signals.py`."""
    assert drop_reason(group(0, [1.0, FailureKind.TIMEOUT]), FilterConfig()) is None
    assert drop_reason(group(1, [FailureKind.ENGINE, FailureKind.TIMEOUT]), FilterConfig()) == "failed"


def br048_groups() -> tuple[Group, Group]:
    """All wrong with lengths 5, 5, 19, 20 of 20; and mixed scores at equal length."""
    lengths = (5, 5, 19, 20)
    wrong = Group(
        group_id=0,
        prompt=prompt(),
        trajectories=tuple(
            trajectory(0.0, member_idx=i, num_tokens=n, is_truncated=n == 20) for i, n in enumerate(lengths)
        ),
    )
    return wrong, group(1, [1.0, 0.0, 1.0, 0.0])


def test_br048_flat_groups_are_judged_by_the_raw_score() -> None:
    wrong, mixed = br048_groups()
    shape_rewards([wrong, mixed], OverlongConfig(buffer_frac=0.25), max_response_tokens=20)
    assert [t.reward for t in wrong.trajectories] == pytest.approx([0, 0, -0.8, -1.0])
    config = FilterConfig(drop_flat=True)
    assert config.metric == "score"
    assert [drop_reason(g, config) for g in (wrong, mixed)] == ["flat", None]


def test_br048_the_shaped_reward_must_be_asked_for_by_name() -> None:
    wrong, mixed = br048_groups()
    shape_rewards([wrong, mixed], OverlongConfig(buffer_frac=0.25), max_response_tokens=20)
    assert drop_reason(wrong, FilterConfig(drop_flat=True, metric="reward")) is None


def test_a_lone_member_has_nothing_to_be_compared_with() -> None:
    """Its siblings failed: the group is dropped with those whose members are all alike."""
    lone = group(1, [1.0, FailureKind.ENGINE])
    assert drop_reason(lone, FilterConfig(drop_flat=True, min_scored=1)) == "flat"


def test_shaping_twice_charges_once() -> None:
    wrong, _ = br048_groups()
    for _ in range(2):
        shape_rewards([wrong], OverlongConfig(buffer_frac=0.25), max_response_tokens=20)
    assert [t.reward for t in wrong.trajectories] == pytest.approx([0, 0, -0.8, -1.0])
    assert wrong.trajectories[3].reward_terms == pytest.approx({"score": 0.0, "overlong": -1.0})


def test_unknown_filter_metric_names_the_terms() -> None:
    mixed = group(1, [1.0, 0.0])
    shape_rewards([mixed], OverlongConfig(), max_response_tokens=20)
    with pytest.raises(DataError, match="'digits'") as caught:
        is_flat(mixed, "digits")
    assert "score" in caught.value.remedy


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_br061_ratio_is_one_at_any_temperature_when_logits_are_divided(temperature: float) -> None:
    """Logits [2,0], token 0. Engine and trainer both take log-softmax of logits / T; at 0.5 that is of [4,0]."""
    logits = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    scored = torch.log_softmax(logits / temperature, -1)[:, 0]
    if temperature == 0.5:
        assert scored.item() == pytest.approx(-0.01815, abs=1e-5)
    yes = torch.tensor([True])
    batch = PolicyTensors(
        logprobs=scored,
        proximal_logprobs=scored,
        behavior_logprobs=scored,
        advantages=torch.ones(1, dtype=torch.float64),
        loss_mask=yes,
        action_mask=yes,
        cu_seqlens=torch.tensor([0, 1]),
    )
    counts = loss_counts(yes, batch.cu_seqlens, max_response_tokens=4)
    _, values = policy_objective(batch, GRPO, counts)
    assert values["actor/ratio/mean"].result() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_br080_masked_tokens_leave_the_denominator(mode: str) -> None:
    """Answers of 4, 4 and 8 tokens, the third masked, loss 1 a token."""
    mask = torch.tensor([True] * 8 + [False] * 8)
    cu = torch.tensor([0, 4, 8, 16])
    counts = loss_counts(mask, cu, max_response_tokens=8)
    loss = aggregate(torch.ones(16), mask, cu, mode=mode, counts=counts)
    by_hand = {
        "token_mean": 8 / 8,
        "sequence_mean_token_mean": 2 / 2,
        "sequence_mean_token_sum": 8 / 2,
        "sequence_mean_token_sum_norm": 8 / (2 * 8),
    }
    assert loss.item() == by_hand[mode]


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("loss_name", ["clip", "gspo", "cispo", "reinforce"])
def test_br080_nothing_left_is_exactly_zero_with_a_zero_gradient(mode: str, loss_name: str) -> None:
    """Even where the masked tokens hold -inf and NaN."""
    now = torch.tensor([-math.inf, -1.0, math.nan], requires_grad=True)
    no = torch.zeros(3, dtype=torch.bool)
    batch = PolicyTensors(
        logprobs=now,
        proximal_logprobs=torch.tensor([-math.inf, -math.inf, math.nan]),
        behavior_logprobs=torch.full((3,), math.nan),
        advantages=torch.full((3,), math.nan),
        loss_mask=no,
        action_mask=~no,
        cu_seqlens=torch.tensor([0, 1, 3]),
    )
    config = AlgorithmConfig(loss=loss_name, aggregation=mode)
    counts = loss_counts(no, batch.cu_seqlens, max_response_tokens=4)
    loss, _ = policy_objective(batch, config, counts)
    (gradient,) = torch.autograd.grad(loss, now)
    assert loss.item() == 0.0
    assert gradient.tolist() == [0.0, 0.0, 0.0]


def test_br080_a_tool_span_counts_in_no_denominator() -> None:
    mask = torch.tensor([True, True, False, False, False, True])
    counts = loss_counts(mask, torch.tensor([0, 6]), max_response_tokens=8)
    assert counts.num_loss_tokens == 3


def test_br080_truncated_responses_are_masked_and_still_in_the_baseline() -> None:
    members = (trajectory(1.0), trajectory(0.0, member_idx=1, is_truncated=True))
    whole = Group(group_id=0, prompt=prompt(), trajectories=members)
    kept, cut = train_sequences([whole], FilterConfig(mask_truncated=True))
    assert (int(kept.loss_mask.sum()), int(cut.loss_mask.sum())) == (3, 0)
    assert int(cut.action_mask.sum()) == 3  # generated tokens still count for throughput
    assert token_advantages([kept, cut]) == [0.5, -0.5]


def test_br080_an_episode_cut_by_the_context_or_its_turns_is_truncated_as_well() -> None:
    """Its last response stopped by itself: only the loop that cut the episode knows."""
    members = (trajectory(1.0), replace(trajectory(0.0, member_idx=1), was_cut_off=True))
    sequences = train_sequences(
        [Group(group_id=0, prompt=prompt(), trajectories=members)], FilterConfig(mask_truncated=True)
    )
    assert [int(s.loss_mask.sum()) for s in sequences] == [3, 0]
    assert [s.is_truncated for s in sequences] == [False, True]


def test_br085_equal_prompts_are_two_groups() -> None:
    """Same tokens, other hidden state: rewards [0]*4 and [1]*4; also the same row admitted twice."""
    for other_row in ("row-1", "row-0"):
        groups = [group(10, [0.0] * 4), group(11, [1.0] * 4, prompt_id=other_row)]
        sequences = train_sequences(groups, FilterConfig())
        assert token_advantages(sequences) == [0.0] * 8


def critic_sequence(mask: list[int], values: list[float], *, is_truncated: bool = False) -> TrainSequence:
    action_mask = np.array(mask, np.bool_)
    return TrainSequence(
        group_id=0,
        member_idx=0,
        source="test",
        token_ids=np.zeros(len(mask), np.int32),
        action_mask=action_mask,
        loss_mask=action_mask.copy(),
        behavior_logprobs=np.zeros(len(mask), np.float32),
        reward=1.0,
        oldest_version=0,
        values=np.array(values, np.float32),
        is_truncated=is_truncated,
    )


def gae_advantages(sequence: TrainSequence, **config: object) -> list[float]:
    estimate_advantages([sequence], AlgorithmConfig(name="ppo", scale="none", **config))  # type: ignore[arg-type]
    assert sequence.advantages is not None
    return sequence.advantages.tolist()


@pytest.mark.parametrize("tool_tokens", [2, 200])
def test_br095_a_tool_span_takes_no_discount(tool_tokens: int) -> None:
    mask = [1, *[0] * tool_tokens, 1, 0]
    got = gae_advantages(critic_sequence(mask, [0.0] * len(mask)), gamma=0.5, gae_lambda=1.0)
    assert (got[0], got[tool_tokens + 1]) == (0.5, 1.0)
    assert sum(got) == 1.5


@pytest.mark.parametrize("masked_value", [50.0, 1e6])
def test_br095_values_at_masked_places_are_not_read(masked_value: float) -> None:
    got = gae_advantages(critic_sequence([1, 1, 0], [0.2, 0.4, masked_value]), gamma=1.0, gae_lambda=0.5)
    assert got == pytest.approx([0.5, 0.6, 0.0])


def test_br095_truncation_ends_at_zero_or_at_the_last_value() -> None:
    """One token, value 0.4, reward 1, gamma 0.5: 1 - 0.4; or 1 + 0.5 x 0.4 - 0.4. Only truncated ones differ."""
    for truncation, is_truncated, expected in (
        ("zero", True, 0.6),
        ("last_value", True, 0.8),
        ("last_value", False, 0.6),
    ):
        sequence = critic_sequence([0, 1], [9.0, 0.4], is_truncated=is_truncated)
        got = gae_advantages(sequence, truncation=truncation, gamma=0.5)
        assert got == pytest.approx([0.0, expected])


def test_gae_of_many_lengths_equals_each_alone() -> None:
    """The vectorised backward walk against a plain loop."""
    draw = np.random.default_rng(1)
    lengths = np.array([4, 0, 1, 7, 4])
    rewards, values = draw.normal(size=(2, int(lengths.sum())))
    last = draw.normal(size=5)
    got = gae(rewards, values, lengths, last, gamma=0.9, gae_lambda=0.7)
    expected, end = [], 0
    for b, length in enumerate(lengths):
        start, end = end, end + length
        carried, following, out = 0.0, last[b], []
        for t in reversed(range(start, end)):
            carried = rewards[t] + 0.9 * following - values[t] + 0.63 * carried
            following = values[t]
            out.append(carried)
        expected += out[::-1]
    assert got == pytest.approx(expected)


def test_a_reward_that_is_not_finite_stops_before_the_optimizer() -> None:
    sequence = critic_sequence([0, 1], [0, 0])
    sequence.reward = math.nan
    with pytest.raises(DataError, match="0/0 has reward nan"):
        estimate_advantages([sequence], GRPO)


def test_a_logprob_that_is_not_finite_under_the_mask_is_named() -> None:
    yes = torch.tensor([True, True])
    batch = PolicyTensors(
        logprobs=torch.tensor([-1.0, -1.0]),
        proximal_logprobs=torch.tensor([-1.0, -math.inf]),
        behavior_logprobs=torch.tensor([-1.0, -1.0]),
        advantages=torch.ones(2),
        loss_mask=yes,
        action_mask=yes,
        cu_seqlens=torch.tensor([0, 2]),
    )
    counts = loss_counts(yes, batch.cu_seqlens, max_response_tokens=4)
    with pytest.raises(DataError, match="1 of 2 proximal values"):
        policy_objective(batch, GRPO, counts)


def test_counting_tokens_before_the_masks_is_refused() -> None:
    """A zero denominator with loss tokens present is a mistake in the order of things, not an empty batch."""
    mask = torch.tensor([True])
    empty = loss_counts(~mask, torch.tensor([0, 1]), max_response_tokens=4)
    with pytest.raises(DataError, match="1 loss tokens"):
        aggregate(torch.ones(1), mask, torch.tensor([0, 1]), mode="token_mean", counts=empty)


def test_fresh_sequences_are_the_first_of_one_version_and_no_more_are_made() -> None:
    """In an asynchronous run thousands of finished groups wait; a few show the gap of the newest version."""

    def finished() -> Iterator[Group]:
        for group_id in range(3):
            yield group(group_id, [1.0, 0.0])
        raise AssertionError("looked further than it had to")

    found = fresh_sequences(finished(), FilterConfig(), weight_version=0, most=5)
    assert [(s.group_id, s.member_idx) for s in found] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert fresh_sequences([group(0, [1.0])], FilterConfig(), weight_version=1, most=5) == []
