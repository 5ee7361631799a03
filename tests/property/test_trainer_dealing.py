"""How micro batches are dealt to ranks: nothing lost or computed twice, the same number for each, within the budget."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.trainer.packing import computed_tokens, deal_micro_batches, plan_micro_batches
from trainer_tiny import sequence

lengths = st.lists(st.integers(1, 30), min_size=0, max_size=24)


@settings(max_examples=150, deadline=None)
@given(lengths, st.integers(5, 80), st.integers(1, 5), st.booleans())
def test_each_sequence_is_computed_once_and_every_rank_computes_as_often(
    responses: list[int], budget: int, num_ranks: int, share_prompts: bool
) -> None:
    given_sequences = [sequence([1, 2, 3], [4] * n, group_id=i // 3) for i, n in enumerate(responses)]
    indices = range(len(given_sequences))
    dealt = deal_micro_batches(
        given_sequences, indices, budget, share_prompts=share_prompts, num_ranks=num_ranks
    )
    assert len(dealt) == num_ranks
    assert len({len(micro_batches) for micro_batches in dealt}) == 1
    assert sorted(i for rank in dealt for members in rank for i in members) == list(indices)
    for members in (members for rank in dealt for members in rank if len(members) > 1):
        tokens = sum(computed_tokens(given_sequences[i]) for i in members)
        groups = {given_sequences[i].group_id for i in members}
        shared = 3 * (len(members) - len(groups)) if share_prompts else 0
        assert tokens - shared <= budget
    if num_ranks == 1:
        plan = plan_micro_batches(given_sequences, indices, budget, share_prompts=share_prompts)
        assert dealt == [plan], "one process computes what it always did"


def test_one_micro_batch_of_work_is_split_in_two_for_two_ranks() -> None:
    """8 sequences of 10 computed tokens and a budget of 100: 40 tokens each, not 80 and none."""
    given_sequences = [sequence([1], [2] * 10, group_id=i) for i in range(8)]
    dealt = deal_micro_batches(given_sequences, range(8), 100, share_prompts=True, num_ranks=2)
    assert [[len(members) for members in rank] for rank in dealt] == [[4], [4]]
