"""Logprobs under a temperature, in chunks, with their gradients."""

from __future__ import annotations

import pytest
import torch

from rollbook.errors import ConfigError
from rollbook.modeling.logprobs import LmHead, token_logprobs

TWO_TOKENS = LmHead(torch.tensor([[2.0], [0.0]]))
"""Logits [2, 0] for the hidden state [1]."""


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, -0.01815), (1.0, -0.12693), (2.0, -0.31326)])
def test_temperature_divides_logits_and_never_logprobs(temperature: float, expected: float) -> None:
    """BR-061: ln softmax of [4, 0], [2, 0] and [1, 0]. A divided logprob would be -0.25386 at T = 0.5."""
    logprobs, _ = token_logprobs(torch.ones(1, 1), TWO_TOKENS, torch.tensor([0]), temperature=temperature)
    assert logprobs.item() == pytest.approx(expected, abs=5e-6)


def test_temperature_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="temperature 0"):
        token_logprobs(torch.ones(1, 1), TWO_TOKENS, torch.tensor([0]), temperature=0.0)


def test_entropy_is_of_the_scaled_distribution() -> None:
    """p = softmax [4, 0] = (0.98201, 0.01799): -sum p ln p = 0.01783 + 0.07228 = 0.0901 nats."""
    _, entropy = token_logprobs(
        torch.ones(1, 1), TWO_TOKENS, torch.tensor([0]), temperature=0.5, with_entropy=True
    )
    assert entropy is not None
    assert entropy.item() == pytest.approx(0.0901, abs=1e-4)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
@pytest.mark.parametrize("keep_bytes", [0, 1 << 20])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradients_agree_with_finite_differences(
    chunk_tokens: int, keep_bytes: int, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    targets = torch.tensor([1, 0, 5, 5, 2, 6, 3])

    def both(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        head = LmHead(weight, bias, softcap, scale=0.7)
        logprobs, entropy = token_logprobs(
            hidden,
            head,
            targets,
            temperature=1.3,
            chunk_tokens=chunk_tokens,
            keep_bytes=keep_bytes,
            with_entropy=True,
        )
        assert entropy is not None
        return logprobs, entropy

    # The first backward pass may use kept logits and the next ones compute them again, in chunks.
    assert torch.autograd.gradcheck(both, (draw(7, 4), draw(8, 4), draw(8)), nondet_tol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_equal_log_softmax_of_all_logits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 16, generator=generator).to(dtype)
    weight = torch.randn(300, 16, generator=generator).to(dtype)
    targets = torch.randint(0, 300, (50,), generator=generator)
    logprobs, _ = token_logprobs(hidden, LmHead(weight), targets, chunk_tokens=7)
    expected = torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


def test_no_tokens_give_an_empty_result_with_a_zero_gradient() -> None:
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.ones(8, 4, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, LmHead(weight), torch.zeros(0, dtype=torch.int64))
    logprobs.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()
