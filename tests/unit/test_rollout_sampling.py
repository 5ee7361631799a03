"""How a token is drawn and which logprob is reported for it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rollbook.rollout.native import sampling
from rollbook.rollout.native.draws import sequence_key, uniforms
from rollbook.rollout.native.sampling import Draws, sample

KEY_OF_ZEROS = 0x238275BC38FCBE91
UNIFORMS_OF_ZEROS = [0.1296456182997474, 0.049920065672091285]


def draws(
    uniform: list[float], *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> Draws:
    count = len(uniform)
    return Draws(
        temperature=np.full(count, temperature, np.float32),
        top_p=np.full(count, top_p, np.float32),
        top_k=np.full(count, top_k, np.int64),
        min_p=np.full(count, min_p, np.float32),
        uniform=np.array(uniform),
    )


def drawn(probabilities: list[float], uniform: list[float], **settings: Any) -> list[int]:
    logits = torch.tensor(probabilities).log().expand(len(uniform), -1)
    return sample(logits, draws(uniform, **settings))[0].tolist()


def test_logprob_is_of_the_scaled_logits() -> None:
    """BR-061: logits [2, 0] at temperature 0.5 are [4, 0]; ln p(0) = -ln(1 + exp(-4)) = -0.01815."""
    tokens, logprobs = sample(torch.tensor([[2.0, 0.0]]), draws([0.5], temperature=0.5))
    assert tokens.tolist() == [0]
    assert logprobs.item() == pytest.approx(-math.log1p(math.exp(-4)), abs=1e-7)
    assert round(logprobs.item(), 5) == -0.01815


def test_temperature_zero_takes_the_largest_logit_and_its_unscaled_logprob() -> None:
    tokens, logprobs = sample(torch.tensor([[0.0, 2.0, 2.0]]), draws([0.99], temperature=0.0))
    assert tokens.tolist() == [1]  # the first of equals
    assert logprobs.item() == pytest.approx(2 - math.log(1 + 2 * math.exp(2)), abs=1e-6)


def test_uniform_falls_into_the_cumulative_distribution() -> None:
    """0.2 | 0.3 | 0.5 end at 0.2, 0.5 and 1."""
    assert drawn([0.2, 0.3, 0.5], [0.0, 0.19, 0.21, 0.49, 0.51, 0.999999999]) == [0, 0, 1, 1, 2, 2]


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    edges = [0.0, 0.5, 1 - 2.0**-53]
    assert drawn([0.0, 0.5, 0.0, 0.5, 0.0], edges) == [1, 3, 3]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 2}, {0, 3}),
        ({"top_p": 0.5}, {0, 3}),  # 0.4 is not enough, 0.4 + 0.3 is
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.0001}, {0}),  # the likeliest always stays
        ({"min_p": 0.49}, {0, 3, 1}),  # at least 0.196
        ({"top_k": 3, "top_p": 0.6}, {0, 3}),  # of the three kept, 0.4 / 0.9 is not enough, 0.7 / 0.9 is
        ({"top_k": 100}, {0, 1, 2, 3}),
    ],
)
def test_filters_keep_these_tokens_of_four(settings: dict[str, Any], kept: set[int]) -> None:
    """Probabilities 0.4, 0.2, 0.1, 0.3."""
    grid = [i / 1000 for i in range(1000)]
    assert set(drawn([0.4, 0.2, 0.1, 0.3], grid, **settings)) == kept


def test_top_p_is_reached_when_it_is_met_exactly() -> None:
    """Of four equal tokens two have half of the probability: the third comes too late."""
    kept = {token for (token,) in (drawn([0.25] * 4, [u], top_p=0.5) for u in np.linspace(0, 0.999, 40))}
    assert kept == {0, 1}


def test_filters_do_not_change_the_reported_logprob() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.5]])
    for settings in ({"top_k": 1}, {"top_p": 0.3}, {"min_p": 0.9}):
        tokens, logprobs = sample(logits, draws([0.5], **settings))
        assert logprobs.item() == pytest.approx(torch.log_softmax(logits, -1)[0, tokens[0]].item(), abs=1e-6)


def test_filtered_draws_follow_the_renormalized_distribution() -> None:
    """Top-2 of 0.4, 0.2, 0.1, 0.3 leaves 4/7 and 3/7; over a fine grid of uniforms the shares are exact."""
    grid = [(i + 0.5) / 7000 for i in range(7000)]
    found = drawn([0.4, 0.2, 0.1, 0.3], grid, top_k=2)
    assert found.count(0) == 4000 and found.count(3) == 3000


@pytest.mark.parametrize("num_tokens", [3, 512, 513, 640, 5000])
def test_search_by_blocks_draws_what_a_plain_search_draws(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(64, num_tokens, generator=generator) * 3
    uniform = torch.rand(64, generator=generator, dtype=torch.float64)
    tokens, logprobs = sample(logits, draws(uniform.tolist()))
    weights = torch.softmax(logits.double(), -1).cumsum(-1)
    expected = (weights <= uniform[:, None]).sum(-1)
    assert (tokens == expected).sum() >= 63  # a uniform within rounding of an edge may fall beside it
    exact = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), exact, atol=1e-5, rtol=0)


def test_each_row_is_drawn_by_its_own_settings() -> None:
    logits = torch.tensor([0.4, 0.2, 0.1, 0.3]).log().expand(4, -1)
    rows = Draws(
        temperature=np.array([1, 0, 1, 2], np.float32),
        top_p=np.array([1, 1, 0.4, 1], np.float32),
        top_k=np.array([0, 0, 0, 2], np.int64),
        min_p=np.zeros(4, np.float32),
        uniform=np.array([0.65, 0.65, 0.65, 0.65]),
    )
    tokens, logprobs = sample(logits, rows)
    assert tokens.tolist() == [2, 0, 0, 3]
    halved = torch.log_softmax(logits[0] / 2, -1)
    assert logprobs[3].item() == pytest.approx(halved[3].item(), abs=1e-6)


def test_rows_in_parts_are_drawn_as_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 30, generator=torch.Generator().manual_seed(0))
    rows = draws([0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9], temperature=0.7, top_k=9)
    at_once = sample(logits, rows)
    monkeypatch.setattr(sampling, "MAX_LOGITS_AT_ONCE", 60)
    in_parts = sample(logits, rows)
    assert torch.equal(at_once[0], in_parts[0]) and torch.equal(at_once[1], in_parts[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_give_a_logprob_that_is_not_finite(bad: float) -> None:
    logits = torch.zeros(2, 8)
    logits[1, 3] = bad
    _, logprobs = sample(logits, draws([0.5, 0.5]))
    assert torch.isfinite(logprobs).tolist() == [True, False]


def test_draws_are_the_same_in_every_release() -> None:
    """A stored run can only be replayed if this hash never changes."""
    assert sequence_key(0, 0, 0) == KEY_OF_ZEROS
    keys = np.array([KEY_OF_ZEROS, KEY_OF_ZEROS], np.uint64)
    assert uniforms(keys, np.array([0, 1])).tolist() == UNIFORMS_OF_ZEROS


def test_draws_are_uniform_and_streams_are_apart() -> None:
    """64 streams of 1,000 draws: mean 1/2, no correlation between neighbors in stream or index."""
    keys = np.array([sequence_key(1, group, member) for group in range(8) for member in range(8)], np.uint64)
    table = np.stack([uniforms(keys, np.full(64, idx)) for idx in range(1000)])
    assert table.min() >= 0 and table.max() < 1
    assert abs(table.mean() - 0.5) < 5 * math.sqrt(1 / 12 / table.size)
    centered = table - 0.5
    bound = 5 / math.sqrt(table.size) / 12
    assert abs((centered[1:] * centered[:-1]).mean()) < bound
    assert abs((centered[:, 1:] * centered[:, :-1]).mean()) < bound
    assert len(np.unique(table)) == table.size


def test_negative_and_large_seeds_have_streams_of_their_own() -> None:
    keys = {sequence_key(seed, 0, 0) for seed in (-1, 0, 1, 2**63, 2**64 - 2)}
    assert len(keys) == 5
