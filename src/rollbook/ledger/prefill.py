"""Prefill beside decoding: prompts whole, or in chunks that fill up decode steps.

    whole prompts     calls of their own, during which nothing decodes: seconds = FLOPs / rate
    chunked           a step takes its running sequences first and prompt tokens up to a budget; it reads the weights
                      once for both, so it takes longer than a plain step by what the chunk computes beyond that

The members of a group share one prefill where the engine keeps prefixes.
"""

from __future__ import annotations

from rollbook.ledger.account import PrefillAccount
from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.decode import decode_step, prefill_s
from rollbook.ledger.flops import attention_flops, prefill_flops, turn_prefill_flops, turn_prefill_tokens
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.layout import ReplicaLayout
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.workload import Workload


def prefill_account(
    model: ModelSpec,
    workload: Workload,
    cluster: Cluster,
    assumptions: Assumptions,
    layout: ReplicaLayout,
    *,
    num_replicas: int,
    num_rows: float,
    context_tokens: float,
    plain_step_s: float,
) -> PrefillAccount:
    """Prompts once per group or once per trajectory; observations of every trajectory, and all before them when
    the prefix is lost.

    Args:
        num_rows, context_tokens, plain_step_s: of a decode step with full slots.
    """
    prefills = workload.num_prefills
    tokens = prefills * workload.prompt_tokens + workload.num_sequences * turn_prefill_tokens(workload)
    pairs = prefills * float(attention_flops(model, workload.prompt_tokens))
    later = workload.num_sequences * turn_prefill_flops(model, workload)
    room = workload.prefill_chunk_tokens - num_rows
    shared = (workload.num_sequences - prefills) * workload.prompt_tokens
    if room <= 0:
        flops = prefills * float(prefill_flops(model, workload.prompt_tokens)) + later
        whole = prefill_s(model, cluster, assumptions.decode, layout, flops=flops, attention_flops=pairs)
        return PrefillAccount(
            tokens=tokens,
            shared_tokens=shared,
            chunk_tokens=0.0,
            num_mixed_steps=0.0,
            plain_step_s=plain_step_s,
            mixed_step_s=0.0,
            seconds=float(whole) / num_replicas,
        )
    chunk = min(room, tokens / num_replicas)
    num_mixed = tokens / num_replicas / chunk
    # What attends of later turns is all their FLOPs beyond the matrices'.
    matrices = 2.0 * (model.body_params + model.active_routed_params)
    pairs += max(later - matrices * workload.num_sequences * turn_prefill_tokens(workload), 0.0)
    mixed = decode_step(
        model,
        cluster,
        assumptions.decode,
        layout,
        num_rows=num_rows,
        context_tokens=context_tokens,
        prompt_tokens=chunk,
        prompt_attention_flops=pairs / num_replicas / num_mixed,
    )
    mixed_s = float(mixed.seconds)
    return PrefillAccount(
        tokens=tokens,
        shared_tokens=shared,
        chunk_tokens=chunk,
        num_mixed_steps=num_mixed,
        plain_step_s=plain_step_s,
        mixed_step_s=mixed_s,
        seconds=num_mixed * (mixed_s - plain_step_s),
    )
