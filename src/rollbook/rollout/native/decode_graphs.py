"""Decode steps recorded as CUDA graphs: one launch a step instead of a thousand.

    plan ──► sizes (rows, pages) ──► padded into the graph's own inputs ──► replay ──► logits of the real rows

A graph is bound to its sizes and to the addresses of weights and pool. Sizes are rounded up, four to each doubling, so
that a rollout meets few of them; weights are swapped in place, so publications leave graphs valid; sleep drops them.
A size is recorded when it comes for the second time. Padding reads and writes nothing of a real row:

- a padding row writes its keys and values to the scratch page and has an empty list of pages;
- a padding page follows the used ones in the pool, and nobody lists it;
- what is left of the page lists belongs to the last row, which is always padding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollbook.rollout.native.paged_attention import KVPool, PageBatch, StepTensors
from rollbook.rollout.native.sequences import StepRows

Compute = Callable[[Tensor, Tensor, StepTensors], Tensor]
"""([1, R] ids, [1, R] positions, step) -> [R, V] logits."""

MOST_GRAPHS = 64
"""Recorded at a time; the one unused for longest goes first."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one graph: rows with at least one of padding, and pages from the start of the pool."""

    num_rows: int
    num_pages: int

    @property
    def num_inputs(self) -> int:
        return 4 * self.num_rows + 3 * self.num_pages


def sizes_of(plan: StepRows, pool_pages: int) -> Sizes:
    """The graph that serves a plan without prefill."""
    return Sizes(coarse(plan.num_decode + 1), min(coarse(len(plan.page_owner)), pool_pages))


def coarse(number: int) -> int:
    """`number` rounded up to one of four sizes to each doubling, at least 8.

    >>> [coarse(n) for n in (1, 9, 33, 41, 65, 100, 257)]
    [8, 10, 40, 48, 80, 112, 320]
    """
    step = max(2, 1 << (number - 1).bit_length() >> 3)
    return max(8, -(-number // step) * step)


def padded(plan: StepRows, sizes: Sizes, pool: KVPool, inputs: NDArray[np.int64]) -> None:
    """Write a plan without prefill into `inputs` [sizes.num_inputs]: ids, positions, where to write, starts of the page
    lists ([R] each), then owner, start and lists ([N] each)."""
    rows, pages, used = sizes.num_rows, sizes.num_pages, plan.num_decode
    num_listed = len(plan.page_lists)
    assert used < rows and num_listed <= pages and len(plan.page_owner) <= pages, "a page has one owner"
    ids, positions, write, starts = inputs[: 4 * rows].reshape(4, rows)
    owner, start, lists = inputs[4 * rows :].reshape(3, pages)
    for column, values, nothing in (
        (ids, plan.token_ids, 0),
        (positions, plan.positions, 0),
        (
            write,
            plan.write_pages * pool.page_tokens + plan.write_offsets,
            pool.scratch_page * pool.page_tokens,
        ),
        (starts, plan.page_list_starts, num_listed),
        (owner, plan.page_owner, 0),
        (start, plan.page_start, 0),
        (lists, plan.page_lists, int(plan.page_lists[0])),  # a page with an owner: its weights are finite
    ):
        column[: len(values)] = values
        column[len(values) :] = nothing


def step_of(inputs: Tensor, sizes: Sizes, pool: KVPool) -> tuple[Tensor, Tensor, StepTensors]:
    """Ids, positions and the step over views of `inputs`, as `padded` laid them out."""
    rows, pages = sizes.num_rows, sizes.num_pages
    ids, positions, write, starts = inputs[: 4 * rows].view(4, rows)
    owner, start, lists = inputs[4 * rows :].view(3, pages)
    batch = PageBatch(rows, owner, start, positions, lists, starts, has_padding=True)
    return ids[None], positions[None], StepTensors(pool, write, [batch], [])


@dataclass(slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    """[sizes.num_inputs] on the device; the graph reads it."""
    held: list[object]
    """Whatever the graph's kernels point to."""


class DecodeGraphs:
    """The recorded steps of one runner; used on the engine's thread.

    Args:
        compute: the model on a step's rows.
        most_rows: of any step.
    """

    def __init__(self, compute: Compute, device: torch.device, *, most_rows: int) -> None:
        self._compute = compute
        self._device = device
        self._most_rows = coarse(most_rows + 1)
        self._recorded: OrderedDict[Sizes, _Recorded] = OrderedDict()
        self._seen: set[Sizes] = set()
        self._memory: object | None = None
        """One pool of intermediate results for all graphs, which never run at the same time."""
        self._stream: torch.cuda.Stream | None = None
        self._logits: Tensor | None = None
        """[most rows, V] results of every graph."""
        self._staging: Tensor | None = None
        self.records = True
        """False: padded steps are computed eagerly; for the comparison with graphs."""
        self.num_recorded = 0
        self.num_replayed = 0

    def logits(self, plan: StepRows, pool: KVPool) -> Tensor:
        """[num_decode, V] of a plan without prefill; valid until the next call."""
        sizes = sizes_of(plan, pool.num_pages)
        recorded = self._recorded.get(sizes)
        if recorded is not None:
            self._recorded.move_to_end(sizes)
            recorded.inputs.copy_(self._staged(plan, sizes, pool), non_blocking=True)
            recorded.graph.replay()
            self.num_replayed += 1
            assert self._logits is not None
            return self._logits[: plan.num_decode]
        inputs = self._staged(plan, sizes, pool).to(self._device, non_blocking=True)
        is_first = sizes not in self._seen
        self._seen.add(sizes)
        if is_first or not self.records:
            return self._compute(*step_of(inputs, sizes, pool))[: plan.num_decode]
        return self._record(inputs, sizes, pool)[: plan.num_decode]

    def drop(self) -> None:
        """Forget every graph and give back its memory: weights or pool are about to leave their addresses. Sizes that
        were met are recorded at once when they come again."""
        self._recorded.clear()
        self._memory = self._logits = None

    def _staged(self, plan: StepRows, sizes: Sizes, pool: KVPool) -> Tensor:
        """The padded plan in page-locked memory. The copy of the step before is done: its tokens were waited for."""
        if self._staging is None or self._staging.numel() < sizes.num_inputs:
            pins = self._device.type == "cuda"
            self._staging = torch.empty(2 * sizes.num_inputs, dtype=torch.int64, pin_memory=pins)
        staging = self._staging[: sizes.num_inputs]
        padded(plan, sizes, pool, staging.numpy())
        return staging

    def _record(self, inputs: Tensor, sizes: Sizes, pool: KVPool) -> Tensor:
        """Compute this step eagerly, as the warm-up of the recording, and record it."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            eager = self._compute(*step_of(inputs, sizes, pool))
            if self._logits is None:
                self._logits = eager.new_empty(self._most_rows, eager.shape[1])
            out = self._logits[: sizes.num_rows]
            self._stream.synchronize()
            # Only this thread's calls are watched: a trainer may allocate while this engine records.
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")  # type: ignore[arg-type]
            try:
                ids, positions, step = step_of(inputs, sizes, pool)
                out.copy_(self._compute(ids, positions, step))
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        eager.record_stream(current)
        self._recorded[sizes] = _Recorded(graph, inputs, [pool, out])
        self.num_recorded += 1
        if len(self._recorded) > MOST_GRAPHS:
            self._recorded.popitem(last=False)
        return eager
