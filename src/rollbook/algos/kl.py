"""Estimators of a KL divergence from sampled tokens, in nats. The estimator is part of the name.

With x drawn from p, and r = q(x) / p(x), each has the expectation or nearly the size of KL(p || q):
k1 = -ln r (unbiased, signed), k2 = (ln r)^2 / 2 (biased, small variance), k3 = r - 1 - ln r (unbiased,
never negative). Source: Schulman, "Approximating KL divergence", 2020.

As a *loss* differentiated through p the three differ: k1 has an expected gradient of zero, k2 that of the
reverse KL, k3 that of the forward KL. KLConfig refuses the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from rollbook.algos.packed import log_ratios


def kl_k1_nats(logprobs: Tensor, other_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[T] ln p - ln q of the sampled tokens; 0 where `mask` is False."""
    return log_ratios(logprobs, other_logprobs, mask)


def kl_k2_nats(logprobs: Tensor, other_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[T] half the square of ln p - ln q; 0 where `mask` is False."""
    return 0.5 * log_ratios(logprobs, other_logprobs, mask).square()


def kl_k3_nats(logprobs: Tensor, other_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[T] q/p - 1 - ln(q/p); never negative; 0 where `mask` is False.

    >>> import torch
    >>> p, q = torch.log(torch.tensor([0.5])), torch.log(torch.tensor([0.25]))
    >>> round(kl_k3_nats(p, q, torch.tensor([True])).item(), 4)  # 0.5 - 1 + ln 2
    0.1931
    """
    difference = log_ratios(other_logprobs, logprobs, mask)
    return difference.expm1() - difference


KL_ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "k1": kl_k1_nats,
    "k2": kl_k2_nats,
    "k3": kl_k3_nats,
}
