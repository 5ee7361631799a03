"""Losses on a CUDA device: the CPU's numbers, and the same bits each time."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from rollbook.algos.aggregate import AGGREGATIONS, LossCounts, aggregate
from rollbook.algos.kl import kl_k3_nats
from rollbook.algos.loss import LOSSES, Clip
from rollbook.algos.packed import sequence_maxima, sequence_sums

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = [1, 700, 3, 0, 4096, 3391]
T = sum(LENGTHS)


def run(loss: str, mode: str, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Loss and gradient of one packed micro batch of 8191 tokens with an empty sequence in it."""
    draw = torch.Generator().manual_seed(0)
    now = (-torch.rand(T, generator=draw, dtype=torch.float64)).to(device, dtype).requires_grad_()
    noise = torch.randn(3, T, generator=draw, dtype=torch.float64).to(device, dtype)
    mask = (torch.rand(T, generator=draw) < 0.7).to(device)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32, device=device)
    anchor = now.detach() + 0.2 * noise[0]
    token = LOSSES[loss](
        now,
        anchor,
        noise[1],
        mask,
        importance_weights=noise[2].exp(),
        cu_seqlens=cu_seqlens,
        clip=Clip(eps_low=0.2, eps_high=0.2),
    )
    losses = token.losses + 0.1 * kl_k3_nats(now, anchor, mask)
    counts = LossCounts(num_loss_tokens=6000, num_loss_sequences=5, max_response_tokens=4096)
    value = aggregate(losses, mask, cu_seqlens, mode=mode, counts=counts)
    (gradient,) = torch.autograd.grad(value, now)
    return value.detach().cpu(), gradient.cpu()


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_cuda_agrees_with_the_cpu_in_fp64(loss: str, mode: str) -> None:
    here, there = run(loss, mode, "cpu", torch.float64), run(loss, mode, "cuda", torch.float64)
    for cpu, cuda in zip(here, there):
        assert (cpu - cuda).abs().max() < 1e-10


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_cuda_repeats_bit_for_bit(loss: str, mode: str) -> None:
    first = run(loss, mode, "cuda", torch.float32)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(loss, mode, "cuda", torch.float32)))


def test_empty_sequences_reduce_to_zero() -> None:
    values = torch.tensor([1.0, 5.0, 2.0], device="cuda")
    cu_seqlens = torch.tensor([0, 0, 2, 2, 3], dtype=torch.int32, device="cuda")
    assert sequence_sums(values, cu_seqlens).tolist() == [0.0, 6.0, 0.0, 2.0]
    assert sequence_maxima(values, cu_seqlens).tolist() == [0.0, 5.0, 0.0, 2.0]
