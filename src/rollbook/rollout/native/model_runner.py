"""Runs one planned step through the model: token ids in, sampled ids and logprobs out.

The model's code stays as it is. The engine runs a module tree of its own that names paged attention; its
parameters are copies, or with `share_weights` the very memory of the model it was given, which is never modified.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollbook.errors import EngineError
from rollbook.modeling.decoder import Decoder
from rollbook.modeling.load import LoadedModel
from rollbook.rollout.native.decode_graphs import DecodeGraphs
from rollbook.rollout.native.live_weights import NativeWeights
from rollbook.rollout.native.paged_attention import (
    ATTENTION_NAME,
    KVPool,
    LayerShapes,
    PageBatch,
    SpanRows,
    StepTensors,
    running_step,
)
from rollbook.rollout.native.sampling import Draws, sample
from rollbook.rollout.native.sequences import PrefillSpan, StepRows
from rollbook.types import Floats

Indices = NDArray[np.int64]

MIN_INVARIANT_ROWS = 8
"""Fewer rows than this are computed by other kernels (matrix times vector)."""


def engine_model(
    model: LoadedModel, *, dtype: torch.dtype, device: torch.device, share_weights: bool
) -> LoadedModel:
    """A module tree like the model's that names paged attention.

    Raises:
        EngineError: weights can't be shared because dtype or device differ.
    """
    memo: dict[int, Any] = {}
    for name, parameter in model.module.named_parameters():
        if share_weights and (parameter.dtype != dtype or parameter.device.type != device.type):
            raise EngineError(
                f"weights can't be shared: {name} is {parameter.dtype} on {parameter.device}, the engine runs "
                f"{dtype} on {device}",
                "set rollout.dtype = \"auto\" and the trainer's device, or don't share weights",
            )
        held = parameter.detach()
        held = held if share_weights else held.to(device=device, dtype=dtype, copy=True)
        memo[id(parameter)] = nn.Parameter(held, requires_grad=False)
    # Buffers keep their dtype: rotary frequencies rounded to bfloat16 would turn far positions wrongly.
    module = copy.deepcopy(model.module, memo).to(device)
    own = replace(model, module=module.eval())
    own.set_attention(ATTENTION_NAME)
    return own


class ModelRunner:
    """The model, its KV pool and its sampler. Every method runs on the engine's thread.

    Args:
        model: see `engine_model`.
        num_pages, page_tokens: of the KV pool.
        live: the model that publications write and prove, where it is not `model` (see mismatch.py).
        invariant_rows: when set, a step has at most this many rows, and is filled up to a number of rows at which the
            model gives each row the same bits as among `invariant_rows`: a row never depends on its neighbors.
        graph_rows: record decode steps of up to this many rows as CUDA graphs; 0: never. Only the built-in decoder on
            CUDA is recorded: other models may ask the device for a number in the middle of a step.
    Raises:
        EngineError: the model keeps state that isn't attention's keys and values, or shares layers' keys and values.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        live: LoadedModel | None = None,
        num_pages: int,
        page_tokens: int,
        invariant_rows: int | None,
        graph_rows: int = 0,
    ) -> None:
        self.model = model
        self.live = model if live is None else live
        self.weights = NativeWeights(self.live)
        self._num_pages, self._page_tokens = num_pages, page_tokens
        self.device, self.dtype = model.device, model.dtype
        self._layers = self._observe()
        self._row_sizes = () if invariant_rows is None else self._equal_row_sizes(invariant_rows)
        """Ascending; empty: any number of rows will do."""
        # For bfloat16 on a CPU oneDNN compiles a kernel for every shape it meets: 0.6 ms and 0.7 MB each.
        compiles = self.device.type == "cpu" and self.dtype == torch.bfloat16
        self._few_shapes = compiles and not self._row_sizes
        can_record = self.device.type == "cuda" and isinstance(model.module, Decoder)
        self.graphs = (
            DecodeGraphs(self.compute, self.device, most_rows=graph_rows)
            if graph_rows and can_record
            else None
        )
        self.pool: KVPool | None = None
        self.make_pool()

    def make_pool(self) -> None:
        self.pool = KVPool(
            self._layers,
            num_pages=self._num_pages,
            page_tokens=self._page_tokens,
            dtype=self.dtype,
            device=self.device,
        )

    def drop_pool(self) -> None:
        if self.graphs is not None:
            self.graphs.drop()
        self.pool = None

    def weight_tensors(self) -> list[Tensor]:
        return [p.detach() for model in self._models() for p in model.module.parameters()]

    def pool_tensors(self) -> list[Tensor]:
        return [] if self.pool is None else self.pool.tensors()

    def put_weights_to_sleep(self, level: int) -> None:
        """1: to host memory (they are there already on a CPU). 2: gone, but for those that no publication brings
        back: the base below adapters that are published alone."""
        published = self.weights.specs()
        for model in self._models():
            for name, parameter in model.module.named_parameters():
                if level == 2 and name in published:
                    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
                else:
                    parameter.data = parameter.data.cpu()

    def wake_weights(self) -> None:
        """Weights back on the device; what was dropped is zero until a publication writes it."""
        specs = self.weights.specs()
        for model in self._models():
            for name, parameter in model.module.named_parameters():
                if parameter.numel() == 0:
                    parameter.data = torch.zeros(specs[name].shape, dtype=parameter.dtype, device=self.device)
                else:
                    parameter.data = parameter.data.to(self.device)

    def _models(self) -> list[LoadedModel]:
        return [self.live] if self.live is self.model else [self.live, self.model]

    def _observe(self) -> LayerShapes:
        """One token through the model, to see which layers attend and how wide their keys are."""
        seen: dict[int, Any] = {}
        zero = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with torch.inference_mode(), running_step(seen):
            self.model.hidden_states(zero, zero)
        if sorted(seen) != list(range(self.model.facts.num_layers)):
            raise EngineError(
                f"a {self.model.facts.model_type} model has {self.model.facts.num_layers} layers and {len(seen)} of "
                "them attend through transformers' AttentionInterface",
                'use rollout.engine = "vllm" for this model',
            )
        return [seen[idx] for idx in range(self.model.facts.num_layers)]

    def _equal_row_sizes(self, most_rows: int) -> tuple[int, ...]:
        """Halves of `most_rows` at which the whole model gives each row the bits it has among `most_rows`.

        Kernels choose their order of summation by shape alone, so equal bits on random rows tell for all rows.
        """
        facts, generator = self.model.facts, torch.Generator().manual_seed(0)
        ids = torch.randint(facts.vocab_size, (1, most_rows), generator=generator)
        positions = torch.randint(facts.max_position, (1, most_rows), generator=generator)

        def logits(rows: slice) -> Tensor:
            hidden = self.model.hidden_states(ids[:, rows], positions[:, rows])[0]
            return torch.cat([hidden, self.model.lm_head().logits(hidden)], -1)

        sizes = [most_rows]
        with torch.inference_mode(), running_step({}):
            wanted = logits(slice(0, most_rows))
            while (size := sizes[-1] // 2) >= MIN_INVARIANT_ROWS:
                parts = [slice(first, first + size) for first in range(0, most_rows - size + 1, size)]
                if not all(torch.equal(logits(part), wanted[part]) for part in parts):
                    break
                sizes.append(size)
        return tuple(reversed(sizes))

    def step(self, plan: StepRows, draws: Draws) -> tuple[Indices, Floats]:
        """Run the planned rows; sample one token for each decoding row.

        Returns:
            token ids [num_decode] and logprobs [num_decode].
        """
        assert self.pool is not None, "the engine doesn't step while it sleeps"
        with torch.inference_mode():
            if self.graphs is not None and plan.num_decode and not plan.spans:
                logits = self.graphs.logits(plan, self.pool)
            else:
                ids, positions, step = self._tensors(plan, self.pool)
                with running_step(step):
                    hidden = self.model.hidden_states(ids, positions)[0]
                if plan.num_decode == 0:
                    return np.zeros(0, np.int64), np.zeros(0, np.float32)
                kept = hidden if self._row_sizes else hidden[: self._num_rows(plan.num_decode)]
                logits = self.model.lm_head().logits(kept)
            tokens, logprobs = sample(logits[: plan.num_decode], draws)
            if self.device.type == "cpu":
                return tokens.numpy(), logprobs.numpy()
            both = torch.stack([tokens.double(), logprobs.double()]).cpu().numpy()  # one copy, exact for both
            return both[0].astype(np.int64), both[1].astype(np.float32)

    def compute(self, ids: Tensor, positions: Tensor, step: StepTensors) -> Tensor:
        """[R, V] logits of the rows of `step`."""
        with running_step(step):
            hidden = self.model.hidden_states(ids, positions)[0]
        return self.model.lm_head().logits(hidden)

    def _num_rows(self, wanted: int) -> int:
        """Rows that the model runs for `wanted` ones."""
        if self._row_sizes:
            return next(size for size in self._row_sizes if size >= wanted)
        return few_sizes(wanted) if self._few_shapes else wanted

    def _tensors(self, plan: StepRows, pool: KVPool) -> tuple[Tensor, Tensor, StepTensors]:
        ids, positions, pages, offsets = plan.token_ids, plan.positions, plan.write_pages, plan.write_offsets
        num_padding = self._num_rows(plan.num_rows) - plan.num_rows
        if num_padding:
            nothing = np.zeros(num_padding, np.int64)
            ids, positions = np.concatenate([ids, nothing]), np.concatenate([positions, nothing])
            pages = np.concatenate([pages, nothing + pool.scratch_page])
            offsets = np.concatenate([offsets, nothing])
        num_decode, owner, start = plan.num_decode, plan.page_owner, plan.page_start
        if self._few_shapes and num_decode:
            # The pages that follow in the pool: nobody lists them, so what they give is not read.
            more = np.zeros(min(few_sizes(len(owner)), pool.num_pages) - len(owner), np.int64)
            owner, start = np.concatenate([owner, more]), np.concatenate([start, more])
        arrays = [
            ids,
            positions,
            pages * pool.page_tokens + offsets,
            owner,
            start,
            plan.page_lists,
            plan.page_list_starts,
        ]
        as_rows = bool(self._row_sizes and plan.spans)
        arrays += _rows_of_spans(plan.spans, pool.page_tokens) if as_rows else [s.pages for s in plan.spans]
        tensors = self._to_device(arrays)
        ids_t, positions_t, write_index, owner_t, start_t, lists, list_starts = tensors[:7]
        batches: list[PageBatch] = []
        spans: list[SpanRows] = []
        if num_decode:
            batches.append(
                PageBatch(num_decode, owner_t, start_t, positions_t[:num_decode], lists, list_starts)
            )
        if as_rows:
            gather, row_owner, row_start, row_lists, row_list_starts = tensors[7:]
            end = plan.num_rows
            batches.append(
                PageBatch(
                    end - num_decode,
                    row_owner,
                    row_start,
                    positions_t[num_decode:end],
                    row_lists,
                    row_list_starts,
                    gather,
                )
            )
        else:
            for span, span_pages in zip(plan.spans, tensors[7:], strict=True):
                held = span_pages if span.start else None
                spans.append(SpanRows(span.first_row, span.num_tokens, span.start, held))
        return ids_t[None], positions_t[None], StepTensors(pool, write_index, batches, spans)

    def _to_device(self, arrays: list[Indices]) -> list[Tensor]:
        """All arrays in one transfer."""
        joined = torch.from_numpy(np.concatenate(arrays))
        if self.device.type != "cpu":
            joined = joined.pin_memory().to(self.device, non_blocking=True)
        return list(torch.split(joined, [len(array) for array in arrays]))


def few_sizes(number: int) -> int:
    """`number` rounded up to one of few: eight to each doubling, so at most an eighth more (at least 8).

    >>> [few_sizes(n) for n in (1, 9, 64, 65, 129, 1000)]
    [8, 16, 64, 72, 144, 1024]
    """
    step = max(8, 1 << (number - 1).bit_length() >> 4)
    return -(-number // step) * step


def _rows_of_spans(spans: tuple[PrefillSpan, ...], page_tokens: int) -> list[Indices]:
    """Each prefill token as a row with its own list of pages: (gather, owner, start, lists, list starts)."""
    counts = np.concatenate(
        [np.arange(span.start, span.start + span.num_tokens) // page_tokens + 1 for span in spans]
    )
    gather = np.concatenate(
        [
            span.pages[: position // page_tokens + 1]
            for span in spans
            for position in range(span.start, span.start + span.num_tokens)
        ]
    )
    list_starts = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(counts)), counts)
    lists = np.arange(len(gather))
    start = (lists - list_starts[owner]) * page_tokens
    if len(gather) == 1:  # as in the scheduler: never a batch of one product
        gather, owner, start = (np.repeat(column, 2) for column in (gather, owner, start))
    return [gather, owner, start, lists, list_starts]
