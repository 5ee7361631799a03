"""A scheduler driven by a fake model, with pages that remember what was written into them.

The keys and values are simulated: what a token writes is the exact prefix that made it and the weight version, so a
wrong copy, a page given to two owners or a stale cache entry shows as a wrong prefix.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollbook.rollout.engine import GenerateRequest, Response
from rollbook.rollout.native.pages import CopyPages, merged
from rollbook.rollout.native.scheduler import Scheduler
from rollbook.rollout.native.sequences import StepRows
from rollbook.types import SamplingParams

EOS = 0


@dataclass(frozen=True)
class Written:
    """What stands for the key and value of one token."""

    prefix: tuple[int, ...]
    version: int


class FakePool:
    """Pages that hold `Written`, and the laws that every step must obey."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        size = scheduler.page_tokens
        self.pages: list[list[Written | None]] = [[None] * size for _ in range(scheduler.pool.num_pages)]

    def carry_out(self) -> None:
        for operation in merged(self.scheduler.pool.operations):
            if isinstance(operation, CopyPages):
                assert not set(operation.sources) & set(operation.targets)
                for source, target in zip(operation.sources, operation.targets, strict=True):
                    self.pages[target] = list(self.pages[source])
            else:
                for page in operation.pages:
                    self.pages[page] = [None] * self.scheduler.page_tokens
        self.scheduler.pool.operations.clear()

    def run(self, plan: StepRows) -> None:
        scheduler, size = self.scheduler, self.scheduler.page_tokens
        known = [self._known(int(slot)) for slot in plan.slots]
        prefixes = [tuple(tokens) for tokens in known]
        for span in plan.spans:
            tokens = scheduler._known_ids(span.sequence).tolist()
            prefixes += [tuple(tokens[: span.start + i + 1]) for i in range(span.num_tokens)]
        written = zip(prefixes, plan.write_pages, plan.write_offsets, plan.token_ids, strict=True)
        for prefix, page, offset, token in written:
            assert prefix[-1] == token
            self.pages[page][offset] = Written(prefix, scheduler.weight_version)
        for row, tokens in enumerate(known):
            end = plan.page_list_starts[row + 1] if row + 1 < plan.num_decode else len(plan.page_lists)
            listed = plan.page_lists[plan.page_list_starts[row] : end]
            assert len(listed) == (len(tokens) - 1) // size + 1
            self._check_prefix(listed, tokens)
            for idx, page in enumerate(listed):
                assert plan.page_owner[page] == row
                assert plan.page_start[page] == idx * size
        for span in plan.spans:
            tokens = scheduler._known_ids(span.sequence).tolist()
            self._check_prefix(span.pages, tokens[: span.start + span.num_tokens])

    def _known(self, slot: int) -> list[int]:
        sequence = self.scheduler.slots.sequences[slot]
        assert sequence is not None
        return self.scheduler._known_ids(sequence).tolist()

    def _check_prefix(self, pages: np.ndarray, tokens: list[int]) -> None:
        """Position i holds what the first i + 1 tokens write: attention sees exactly this sequence."""
        size = self.scheduler.page_tokens
        for position in range(len(tokens)):
            held = self.pages[pages[position // size]][position % size]
            assert held is not None and held.prefix == tuple(tokens[: position + 1])


class Run:
    """Drives a scheduler with a fake model whose next token is a function of the prefix."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.pool = FakePool(scheduler)
        self.responses: dict[str, Response] = {}
        self.versions_read: dict[str, set[int]] = defaultdict(set)
        """Request -> versions of the keys that its sampled tokens attended to."""
        self.num_steps = 0

    def step(self, *, starts_new: bool = True) -> bool:
        plan = self.scheduler.plan(starts_new=starts_new)
        self.pool.carry_out()
        if plan is None:
            return False
        if self.scheduler.most_rows is not None:
            assert plan.num_rows <= self.scheduler.most_rows
        self.pool.run(plan)
        self._note_versions(plan)
        tokens = np.array([next_token(self.pool._known(int(slot))) for slot in plan.slots], np.int64)
        finished, failed = self.scheduler.commit(plan, tokens, np.zeros(len(tokens), np.float32))
        assert not failed
        for response in finished:
            assert response.request_id not in self.responses
            self.responses[response.request_id] = response
        self.num_steps += 1
        self.check_books()
        return True

    def _note_versions(self, plan: StepRows) -> None:
        size = self.scheduler.page_tokens
        for row, slot in enumerate(plan.slots):
            sequence = self.scheduler.slots.sequences[slot]
            assert sequence is not None
            listed = plan.page_lists[plan.page_list_starts[row] :]
            for position in range(int(plan.positions[row]) + 1):
                held = self.pool.pages[listed[position // size]][position % size]
                assert held is not None
                self.versions_read[sequence.request.request_id].add(held.version)

    def check_books(self) -> None:
        """Every page has one owner, every slot one sequence."""
        scheduler = self.scheduler
        running = scheduler.running()
        cached = [node.page for node in scheduler.cache._by_key.values()] if scheduler.cache else []
        owned = Counter([page for sequence in running for page in sequence.pages] + cached)
        assert all(count == 1 for count in owned.values())
        assert len(owned) + scheduler.pool.num_free == scheduler.pool.num_pages
        assert len({sequence.slot for sequence in running}) == len(running) == scheduler.num_running
        assert scheduler.num_running + scheduler.num_waiting == len(scheduler.by_request)
        assert scheduler.num_running <= scheduler.num_slots


def next_token(prefix: list[int]) -> int:
    return (sum((i + 1) * token for i, token in enumerate(prefix)) * 7 + len(prefix)) % 11


def expected_response(request: GenerateRequest) -> list[int]:
    """The response that the prompt alone decides."""
    tokens = request.prompt_ids.tolist()
    response: list[int] = []
    while len(response) < request.sampling.max_response_tokens:
        response.append(next_token(tokens + response))
        if response[-1] == EOS:
            break
    return response


def request(request_id: str, prompt_ids: list[int], max_response_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=np.array(prompt_ids, np.int32),
        sampling=SamplingParams(max_response_tokens=max_response_tokens),
        seed=0,
        group_id=0,
        member_idx=0,
    )


def scheduler_of(**changed: Any) -> Scheduler:
    sizes: dict[str, Any] = {
        "num_slots": 4,
        "num_pages": 32,
        "page_tokens": 4,
        "max_prefill_tokens": 100,
        "max_context_tokens": 200,
    }
    return Scheduler(**{**sizes, **changed})
