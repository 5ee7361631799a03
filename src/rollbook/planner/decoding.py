"""The ledger's decode step as a function of live sequences and context, for what needs it many times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rollbook.ledger.decode import decode_step, prefill_s
from rollbook.ledger.flops import attention_flops, prefill_flops
from rollbook.ledger.layout import ReplicaLayout
from rollbook.ledger.lengths import Curve
from rollbook.planner.request import PlanRequest


def decode_step_s(request: PlanRequest, layout: ReplicaLayout) -> Callable[[float, float], float]:
    """Seconds of a decode step of one replica by live sequences and their mean context."""
    return lambda num_live, context: float(decode_steps_s(request, layout, num_live, context))


def decode_steps_s(
    request: PlanRequest, layout: ReplicaLayout, num_live: Curve | float, context: Curve | float
) -> Curve:
    """The same for many numbers of live sequences, or many contexts, at once."""
    model, cluster, assumptions = request.model, request.cluster, request.assumptions
    if assumptions.method == "paper":
        weights = assumptions.weight_bytes_per_param * model.params
        per_token = model.kv_bytes_per_token(assumptions.kv_bytes_per_number)
        rate = layout.num_gpus * cluster.accelerator.hbm_bytes_per_s * assumptions.decode_hbm_frac
        return np.asarray((weights + num_live * context * per_token) / rate)
    return decode_step(
        model, cluster, assumptions.decode, layout, num_rows=num_live, context_tokens=context
    ).seconds


def prefill_token_s(request: PlanRequest, layout: ReplicaLayout) -> float:
    """Seconds that one replica needs for a token of a prompt of average length."""
    model, cluster, assumptions = request.model, request.cluster, request.assumptions
    tokens = request.workload.prompt_tokens
    if assumptions.method == "paper":
        rate = layout.num_gpus * cluster.accelerator.peak("bfloat16") * assumptions.forward_mfu_frac
        return 2 * model.active_params / rate
    seconds = prefill_s(
        model,
        cluster,
        assumptions.decode,
        layout,
        flops=prefill_flops(model, tokens),
        attention_flops=attention_flops(model, tokens),
    )
    return float(seconds) / tokens
