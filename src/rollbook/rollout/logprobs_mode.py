"""Which of an engine's logprobs a trainer can recompute.

Ours are ln p under temperature-scaled logits before top-k, top-p and min-p (`Response.logprobs`). vLLM and servers
like it report either "raw" ones, before temperature, or "processed" ones, after temperature and filters: each equals
ours for some requests and not for others.
"""

from __future__ import annotations

from typing import Literal

from rollbook.types import SamplingParams

LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]


def reports_ours(mode: LogprobsMode, sampling: SamplingParams) -> bool:
    """Whether `mode` gives our number for such a request. A greedy one reports its logprob at temperature 1; it must be
    sent without filters, which don't change its token.

    >>> reports_ours("processed_logprobs", SamplingParams(max_response_tokens=1, temperature=0.7))
    True
    >>> reports_ours("processed_logprobs", SamplingParams(max_response_tokens=1, top_p=0.9))
    False
    >>> reports_ours("raw_logprobs", SamplingParams(max_response_tokens=1, top_p=0.9))
    True
    """
    if sampling.temperature == 0:
        return True
    if mode == "raw_logprobs":
        return sampling.temperature == 1
    return not has_filters(sampling)


def has_filters(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
