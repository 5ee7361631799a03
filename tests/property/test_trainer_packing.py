"""Packing keeps each token once and in order, whatever the budget, and never predicts across sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.errors import DataError
from rollbook.trainer.packing import computed_tokens, pack, plan_micro_batches, shared_prompt_tokens
from rollbook.types import TrainSequence
from trainer_tiny import groups, sequence

CPU = torch.device("cpu")


@st.composite
def batches(draw: st.DrawFn) -> list[TrainSequence]:
    return groups(
        draw(st.integers(1, 6)), draw(st.integers(1, 5)), seed=draw(st.integers(0, 99)), max_response=12
    )


def _cost(sequences: list[TrainSequence], members: list[int], share_prompts: bool) -> int:
    inputs, _ = pack(sequences, members, CPU, share_prompts=share_prompts)
    return inputs.input_ids.shape[0]


@settings(max_examples=80, deadline=None)
@given(sequences=batches(), max_tokens=st.integers(1, 60), share=st.booleans())
def test_each_sequence_once_and_no_micro_batch_over_budget(
    sequences: list[TrainSequence], max_tokens: int, share: bool
) -> None:
    plan = plan_micro_batches(sequences, range(len(sequences)), max_tokens, share_prompts=share)
    assert sorted(i for members in plan for i in members) == list(range(len(sequences)))
    for members in plan:
        assert len(members) == 1 or _cost(sequences, members, share) <= max_tokens


@settings(max_examples=80, deadline=None)
@given(sequences=batches(), max_tokens=st.integers(1, 60), more=st.integers(0, 12), share=st.booleans())
def test_any_number_of_micro_batches_from_the_needed_one_up_can_be_had(
    sequences: list[TrainSequence], max_tokens: int, more: int, share: bool
) -> None:
    """BR-126: ranks agree on the largest number; where sequences run out, fillers are empty."""
    indices = range(len(sequences))
    needed = len(plan_micro_batches(sequences, indices, max_tokens, share_prompts=share))
    plan = plan_micro_batches(
        sequences, indices, max_tokens, share_prompts=share, num_micro_batches=needed + more
    )
    assert len(plan) == needed + more
    assert sorted(i for members in plan for i in members) == list(indices)


def test_ranks_of_five_long_and_five_short_sequences_make_five_calls_each() -> None:
    """BR-126: budget 100, five of 95 tokens on one rank, five of 20 on the other; a third rank has none."""
    long = [sequence([1] * 90, [2] * 6, group_id=i) for i in range(5)]
    short = [sequence([1] * 15, [2] * 6, group_id=i) for i in range(5)]
    assert computed_tokens(long[0]) == 95
    needed = max(len(plan_micro_batches(s, range(5), 100, share_prompts=False)) for s in (long, short))
    assert needed == 5
    for sequences in (long, short, []):
        indices = range(len(sequences))
        plan = plan_micro_batches(sequences, indices, 100, share_prompts=False, num_micro_batches=needed)
        assert len(plan) == 5
    with pytest.raises(DataError, match="5 micro batches of 100 tokens are needed and 4"):
        plan_micro_batches(long, range(5), 100, share_prompts=False, num_micro_batches=4)


@settings(max_examples=80, deadline=None)
@given(sequences=batches(), share=st.booleans(), data=st.data())
def test_each_action_token_is_predicted_by_the_tokens_before_it_in_its_own_sequence(
    sequences: list[TrainSequence], share: bool, data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.sampled_from(range(len(sequences))), unique=True, min_size=1))
    chosen = sorted(chosen, key=lambda i: (sequences[i].group_id, i))
    inputs, micro = pack(sequences, chosen, CPU, share_prompts=share)
    whole = np.concatenate([sequences[i].token_ids for i in chosen])
    starts = micro.cu_seqlens.tolist()
    assert micro.action_mask.nonzero()[:, 0].tolist() == inputs.token_positions.tolist()
    assert whole[inputs.token_positions.numpy()].tolist() == inputs.targets.tolist()
    for position, row in zip(inputs.token_positions.tolist(), inputs.predictor_rows.tolist()):
        which = int(np.searchsorted(starts, position, side="right")) - 1
        before = whole[starts[which] : position]
        # Walk the layout: the predictor's own segment up to it, after its prefix.
        segment = next(s for s in inputs.layout.segments if s.start <= row < s.start + s.num_tokens)
        rows = list(range(segment.start, row + 1))
        if segment.prefix is not None:
            prompt = inputs.layout.segments[segment.prefix]
            rows = [*range(prompt.start, prompt.start + prompt.num_tokens), *rows]
        assert inputs.input_ids[rows].tolist() == before.tolist()
        assert inputs.position_ids[rows].tolist() == list(range(len(before)))


def test_labels_never_cross_sequences() -> None:
    """BR-066: [5, 6, 7] and [8, 9] give the labels [6, 7 | 9]; a global shift would give [6, 7, 8, 9, 5]."""
    both = [sequence([5], [6, 7], group_id=0), sequence([8], [9], group_id=1)]
    inputs, micro = pack(both, [0, 1], CPU, share_prompts=True)
    assert inputs.targets.tolist() == [6, 7, 9]
    assert inputs.input_ids[inputs.predictor_rows].tolist() == [5, 6, 8]
    assert inputs.input_ids.tolist() == [5, 6, 8]  # the last tokens predict nothing
    assert inputs.token_positions.tolist() == [1, 2, 4]
    assert micro.cu_seqlens.tolist() == [0, 3, 5]


def test_a_sequence_without_actions_beside_others_changes_nothing() -> None:
    """BR-066: one sequence of a single token, which predicts nothing."""
    three = [sequence([5], [6, 7], group_id=0), sequence([4], [], group_id=1), sequence([8], [9], group_id=2)]
    inputs, micro = pack(three, [0, 1, 2], CPU, share_prompts=True)
    assert inputs.input_ids[inputs.predictor_rows].tolist() == [5, 6, 8]
    assert inputs.token_positions.tolist() == [1, 2, 5]
    assert micro.cu_seqlens.tolist() == [0, 3, 4, 6]


def test_members_share_their_prompt_and_nothing_the_policy_sampled() -> None:
    members = [sequence([1, 2, 3], [4, 4, 5]), sequence([1, 2, 3], [4, 4, 6]), sequence([1, 2, 3], [7])]
    assert shared_prompt_tokens(members) == 3
    inputs, _ = pack(members, [0, 1, 2], CPU, share_prompts=True)
    assert inputs.input_ids.tolist() == [1, 2, 3, 4, 4, 4, 4]
    assert inputs.predictor_rows.tolist() == [2, 3, 4, 2, 5, 6, 2]


def test_prompts_that_differ_are_shared_only_up_to_the_difference() -> None:
    members = [sequence([1, 2, 3], [4]), sequence([1, 9, 3], [4])]
    assert shared_prompt_tokens(members) == 1


def test_an_action_token_that_nothing_predicts_is_refused() -> None:
    with pytest.raises(DataError, match="sequence 0/0 has an action token at position 0"):
        pack([sequence([], [1, 2])], [0], CPU, share_prompts=True)


def test_annotations_on_a_part_of_the_batch_are_refused() -> None:
    half = [sequence([1], [2], reference_logprobs=np.zeros(2, np.float32)), sequence([1], [2])]
    with pytest.raises(DataError, match="1 of 2 sequences of a micro batch have no reference logprobs"):
        pack(half, [0, 1], CPU, share_prompts=True)


def test_a_sequence_without_importance_weights_weighs_one() -> None:
    half = [sequence([1], [2], importance_weights=np.full(2, 0.5, np.float32)), sequence([1], [2])]
    _, micro = pack(half, [0, 1], CPU, share_prompts=True)
    assert micro.importance_weights is not None
    assert micro.importance_weights.tolist() == [0.5, 0.5, 1.0, 1.0]
