"""Which tokens run in the next step: queue, slots, pages, preemption, reuse of prefixes. No torch here.

    waiting ──admit──► running: prefilling ──► ready ──► finished
       ▲                            │            │
       └─────────── preempt ◄───────┴────────────┘        (keeps its sampled tokens, loses keys and values)

A sequence with n known tokens is *ready* when the keys and values of its first n - 1 are in the pool: the next step
runs its last token and samples one more. Everything before that is *prefill*. So only ready rows get logits, and the
members of a group differ from their first step on: they copy the prompt's pages and run the prompt's last token.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from rollbook.errors import EngineError
from rollbook.rollout.engine import GenerateRequest, KVPolicy, Response, require_runnable
from rollbook.rollout.native.draws import sequence_key
from rollbook.rollout.native.pages import PagePool, PrefixCache
from rollbook.rollout.native.sequences import (
    Counters,
    Failed,
    Indices,
    PrefillSpan,
    Sequence,
    SlotTable,
    StepRows,
)
from rollbook.rollout.stops import meets_stop_string
from rollbook.types import FinishReason, Floats, Ids, KVStart, VersionRun

MAX_MOVES_PER_STEP = 64
"""Pages moved towards the start of the pool in one step, so that a step stays short."""


class Scheduler:
    """Books of one engine. Every method is called on the engine's thread.

    Args:
        num_slots: sequences that run at once.
        num_pages: pages of the KV pool, each of `page_tokens` tokens.
        max_prefill_tokens: prefill rows of one step, at most.
        max_context_tokens: the model's context.
        most_rows: rows of one step, prefill included, at most; None: `max_prefill_tokens` beside all slots.
        eos_token_ids: end a response unless the request ignores them.
        decode_text: token ids to text, for stop strings.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_pages: int,
        page_tokens: int,
        max_prefill_tokens: int,
        max_context_tokens: int,
        use_prefix_cache: bool = True,
        most_rows: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        decode_text: Callable[[list[int]], str] | None = None,
        weight_version: int = 0,
        replica_id: int = 0,
    ) -> None:
        self.replica_id = replica_id
        self.num_slots = num_slots
        self.page_tokens = page_tokens
        self.max_prefill_tokens = max_prefill_tokens
        self.max_context_tokens = max_context_tokens
        self.most_rows = most_rows
        self.eos_token_ids = np.array(eos_token_ids, np.int64)
        self.decode_text = decode_text
        self.weight_version = weight_version
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool, page_tokens) if use_prefix_cache else None
        self.slots = SlotTable(num_slots)
        self.counters = Counters()
        self.by_request: dict[str, Sequence] = {}
        """Everything not finished."""
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._num_waiting = 0
        self._free_slots = list(range(num_slots))
        self._page_slot = np.zeros(num_pages, np.int64)
        self._page_idx = np.zeros(num_pages, np.int64)
        self._siblings: dict[bytes, list[Sequence]] = {}
        self._next_arrival = 0
        # The layout of pages over rows, valid until a page or a row comes or goes.
        self._layout: tuple[Indices, Indices, Indices, Indices] | None = None

    # ---- gauges

    @property
    def num_running(self) -> int:
        return self.num_slots - len(self._free_slots)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def used_tokens(self) -> int:
        """Capacity of the pages that running sequences hold."""
        return int(self.slots.num_pages.sum()) * self.page_tokens

    def running(self) -> list[Sequence]:
        """Oldest first."""
        found = [sequence for sequence in self.slots.sequences if sequence is not None]
        return sorted(found, key=lambda sequence: sequence.rank)

    # ---- requests come and go

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            EngineError: it can never run: no prompt, beyond the context, or larger than the whole pool.
        """
        require_runnable(
            request,
            is_running=request.request_id in self.by_request,
            max_context_tokens=self.max_context_tokens,
            has_tokenizer=self.decode_text is not None,
        )
        num_prompt = len(request.prompt_ids)
        max_response = min(request.sampling.max_response_tokens, self.max_context_tokens - num_prompt)
        # The last token sampled is never written to the pool.
        most_pages = -(-(num_prompt + max_response - 1) // self.page_tokens)
        if most_pages > self.pool.num_pages:
            raise EngineError(
                f"request {request.request_id} may need {num_prompt} + {max_response} tokens of keys and values and "
                f"the pool holds {self.pool.num_pages * self.page_tokens}",
                "raise rollout.kv_pool_tokens or lower rollout.max_response_tokens",
            )
        sequence = Sequence(
            request=request,
            arrival_idx=self._next_arrival,
            num_prompt=num_prompt,
            max_response=max_response,
            version_starts=[(0, self.weight_version)],
        )
        self._next_arrival += 1
        self.by_request[request.request_id] = sequence
        self._enqueue(sequence)

    def cancel(self, request_id: str) -> None:
        """Forget a request; its slot and pages are free at once. Unknown and finished ids are ignored."""
        sequence = self.by_request.get(request_id)
        if sequence is not None:
            self._end(sequence)

    def abort_all(self) -> list[Response]:
        """End every request with the tokens it has."""
        return self.abort_last(len(self.by_request))

    def abort_last(self, num_requests: int) -> list[Response]:
        """End those whose turn would come last, with the tokens they have."""
        ordered = sorted(self.by_request.values(), key=lambda sequence: sequence.rank)
        return [
            self._finish(sequence, FinishReason.ABORTED)
            for sequence in ordered[max(len(ordered) - num_requests, 0) :]
        ]

    def has_started(self) -> bool:
        """Whether any unfinished request has ever been admitted: what a drain waits for."""
        return any(sequence.was_admitted for sequence in self.by_request.values())

    # ---- weights and memory change under us

    def adopt_version(self, weight_version: int, kv_policy: KVPolicy) -> None:
        """Tokens sampled from now on are of `weight_version`. Cached prefixes are dropped: other weights made them.

        "keep" leaves keys and values to the sequences that are between two sampled tokens. Those that still prefill, or
        wait for their first token, begin again, so that a response of one version reads no other version's keys.

        Raises:
            EngineError: the version would run backwards.
        """
        if weight_version < self.weight_version:
            raise EngineError(
                f"the engine holds weight version {self.weight_version} and was told to serve {weight_version}",
                "a replica's version only grows; re-sync it in full under a newer version",
            )
        if weight_version == self.weight_version:
            # Weights were written again under the same number (a repaired replica): what they made is void as well.
            kv_policy = "recompute"
        for sequence in self.by_request.values():
            start = self._num_response(sequence)
            if sequence.version_starts[-1][0] == start:
                sequence.version_starts.pop()
            sequence.version_starts.append((start, weight_version))
        self.weight_version = weight_version
        self.reset_cache()
        self._siblings.clear()
        running = self.running()
        self._restart(running if kv_policy == "recompute" else [s for s in running if not self._has_begun(s)])

    def reset_cache(self) -> None:
        if self.cache is not None:
            self.cache.clear()

    def drop_kv(self) -> None:
        """The pool is going away: running sequences keep their tokens and wait to be recomputed."""
        self.reset_cache()
        for sequence in self.running():
            self._release(sequence)
            self._enqueue(sequence)
        self.pool.operations.clear()

    # ---- one step

    def plan(self, *, starts_new: bool = True) -> StepRows | None:
        """The rows of the next step, or None when nothing can run. Carry out `pool.operations` before running it.

        Args:
            starts_new: whether requests that never had a slot may get one.
        """
        self._admit(starts_new)
        self._extend_ready()
        self._compact()
        ready = np.flatnonzero(self.slots.is_ready)
        budget = self.max_prefill_tokens
        if self.most_rows is not None:
            budget = min(budget, self.most_rows - len(ready))
        spans, span_ids = self._choose_spans(len(ready), budget)
        if len(ready) == 0 and not spans:
            return None
        slots = self.slots
        positions = slots.position[ready]
        owner, start, lists, list_starts = self._page_layout(ready)
        write_pages = slots.pages[ready, positions // self.page_tokens]
        token_ids = slots.last_token[ready]
        if spans:
            span_positions = np.concatenate([np.arange(s.start, s.start + s.num_tokens) for s in spans])
            span_pages = np.concatenate(
                [s.pages[np.arange(s.start, s.start + s.num_tokens) // self.page_tokens] for s in spans]
            )
            token_ids = np.concatenate([token_ids, *span_ids])
            positions = np.concatenate([positions, span_positions])
            write_pages = np.concatenate([write_pages, span_pages])
        return StepRows(
            token_ids=token_ids,
            positions=positions,
            write_pages=write_pages,
            write_offsets=positions % self.page_tokens,
            slots=ready,
            page_owner=owner,
            page_start=start,
            page_lists=lists,
            page_list_starts=list_starts,
            spans=spans,
        )

    def commit(
        self, plan: StepRows, token_ids: Indices, logprobs: Floats
    ) -> tuple[list[Response], list[Failed]]:
        """Book what a step computed.

        Args:
            token_ids: [num_decode] sampled tokens.
            logprobs: [num_decode] float32.
        Returns:
            Responses that are complete, and requests whose logprobs are not finite.
        """
        for span in plan.spans:
            self._book_span(span)
        rows = plan.slots
        if len(rows) == 0:
            return [], []
        slots = self.slots
        count = slots.num_response[rows]
        slots.response_ids[rows, count] = token_ids
        slots.logprobs[rows, count] = logprobs
        slots.last_token[rows] = token_ids
        slots.num_response[rows] = count + 1
        slots.position[rows] += 1
        self.counters.decode_steps += 1
        self.counters.decode_tokens += len(rows)
        self.counters.active_slots_sum += len(rows)
        self.counters.kv_used_tokens_sum += self.used_tokens

        is_broken = ~np.isfinite(logprobs)
        is_stopped = np.isin(token_ids, self.eos_token_ids) & ~slots.ignore_eos[rows]
        for row in np.flatnonzero(slots.has_own_stops[rows] & ~is_stopped):
            is_stopped[row] = self._meets_own_stop(int(rows[row]))
        is_full = slots.num_response[rows] >= slots.max_response[rows]
        finished: list[Response] = []
        failed: list[Failed] = []
        for row in np.flatnonzero(is_stopped | is_full | is_broken):
            sequence = slots.sequences[rows[row]]
            assert sequence is not None
            if is_broken[row]:
                failed.append(self._fail_not_finite(sequence))
            else:
                finished.append(
                    self._finish(sequence, FinishReason.STOP if is_stopped[row] else FinishReason.LENGTH)
                )
        return finished, failed

    # ---- admission

    def _enqueue(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.rank, sequence))
        self._num_waiting += 1

    def _admit(self, starts_new: bool) -> None:
        """Oldest first; nobody overtakes the head, so nobody starves."""
        while self._waiting and self._free_slots:
            sequence = self._waiting[0][1]
            if sequence.is_done:
                heapq.heappop(self._waiting)
                continue
            if not (starts_new or sequence.was_admitted):
                return
            num_known = sequence.num_prompt + len(sequence.response_ids)
            num_pages = -(-num_known // self.page_tokens)
            # Leave room for those that run already to grow, or a newcomer would soon push one of them out.
            wanted = num_pages + self.num_running // 4
            if not self._free_pages(wanted, sequence):
                return
            heapq.heappop(self._waiting)
            self._num_waiting -= 1
            self._start(sequence, num_pages)

    def _free_pages(self, wanted: int, sequence: Sequence) -> bool:
        missing = wanted - self.pool.num_free
        if missing <= 0:
            return True
        if self.cache is None or len(self.cache) < missing:
            return False
        # What it is about to reuse becomes most recent first, so that it is not what gets evicted.
        self.cache.find(sequence.request.prompt_ids)
        return self.cache.evict(missing)

    def _start(self, sequence: Sequence, num_pages: int) -> None:
        slot = self._free_slots.pop()
        slots, request, sampling = self.slots, sequence.request, sequence.request.sampling
        num_response = len(sequence.response_ids)
        slots.widen_responses(min(sequence.max_response, num_response + 64))
        slots.sequences[slot] = sequence
        slots.num_response[slot] = num_response
        slots.max_response[slot] = sequence.max_response
        slots.response_ids[slot, :num_response] = sequence.response_ids
        slots.logprobs[slot, :num_response] = sequence.logprobs
        slots.last_token[slot] = sequence.response_ids[-1] if num_response else request.prompt_ids[-1]
        slots.ignore_eos[slot] = sampling.ignore_eos
        slots.has_own_stops[slot] = bool(sampling.stop_token_ids or sampling.stop_strings)
        slots.key[slot] = sequence_key(request.seed, request.group_id, request.member_idx)
        slots.first_token_idx[slot] = request.first_token_idx
        slots.temperature[slot] = sampling.temperature
        slots.top_p[slot], slots.top_k[slot], slots.min_p[slot] = (
            sampling.top_p,
            sampling.top_k,
            sampling.min_p,
        )
        sequence.slot = slot
        sequence.was_admitted = True
        self._note_start(sequence)
        sequence.num_computed = 0
        self._add_pages(sequence, num_pages)
        self._reuse_prefix(sequence)
        self._mark_ready(sequence)

    def _add_pages(self, sequence: Sequence, num_pages: int) -> None:
        pages = [self.pool.take_lowest() for _ in range(num_pages)]
        if self.cache is not None:
            pages = [self.cache.make_way(page) for page in pages]
        self.pool.zero(pages)
        slot, first = sequence.slot, len(sequence.pages)
        sequence.pages += pages
        end = len(sequence.pages)
        self.slots.widen_pages(end)
        self.slots.pages[slot, first:end] = pages
        self.slots.num_pages[slot] = end
        self._page_slot[pages], self._page_idx[pages] = slot, np.arange(first, end)
        self._layout = None

    # ---- reuse of a prefix

    def _reuse_prefix(self, sequence: Sequence) -> None:
        """Copy what a running sibling or the cache holds of its prompt; all but the last token may be reused."""
        reusable = sequence.num_prompt - 1
        if reusable == 0:
            return
        siblings = self._siblings.setdefault(sequence.prompt_key, [])
        if siblings:
            source = siblings[0]
            if self._num_computed(source) >= reusable:
                self._copy_prefix(sequence, source.pages, reusable)
            else:
                sequence.leader = source.leader or source
                sequence.leader.followers.append(sequence)
        elif self.cache is not None:
            hit = self.cache.find(sequence.request.prompt_ids[:reusable])
            self._copy_prefix(sequence, hit.pages, hit.num_tokens)
        siblings.append(sequence)

    def _copy_prefix(self, sequence: Sequence, pages: list[int], num_tokens: int) -> None:
        num_pages = -(-num_tokens // self.page_tokens)
        self.pool.copy(pages[:num_pages], sequence.pages[:num_pages])
        sequence.num_computed = num_tokens
        sequence.num_cached = max(sequence.num_cached, num_tokens)
        self.counters.cached_prompt_tokens += num_tokens

    def _book_span(self, span: PrefillSpan) -> None:
        sequence = span.sequence
        sequence.num_computed = span.start + span.num_tokens
        self.counters.prefill_tokens += span.num_tokens
        self._mark_ready(sequence)
        reusable = sequence.num_prompt - 1
        if sequence.followers and sequence.num_computed >= reusable:
            for follower in sequence.followers:
                follower.leader = None
                self._copy_prefix(follower, sequence.pages, reusable)
                self._mark_ready(follower)
            sequence.followers = []

    def _mark_ready(self, sequence: Sequence) -> None:
        slot = sequence.slot
        known = sequence.num_prompt + int(self.slots.num_response[slot])
        is_ready = sequence.leader is None and sequence.num_computed == known - 1
        self.slots.is_ready[slot] = is_ready
        self.slots.position[slot] = known - 1
        self._layout = None

    def _num_computed(self, sequence: Sequence) -> int:
        slot = sequence.slot
        return int(self.slots.position[slot]) if self.slots.is_ready[slot] else sequence.num_computed

    def _num_response(self, sequence: Sequence) -> int:
        return (
            int(self.slots.num_response[sequence.slot]) if sequence.slot >= 0 else len(sequence.response_ids)
        )

    # ---- room for the next token

    def _extend_ready(self) -> None:
        """A page for every ready row that begins one; when the pool is full the youngest sequence makes room."""
        slots = self.slots
        is_short = slots.is_ready & (slots.position // self.page_tokens >= slots.num_pages)
        if not is_short.any():
            self._widen_responses()
            return
        short = [slots.sequences[slot] for slot in np.flatnonzero(is_short)]
        for sequence in sorted((s for s in short if s is not None), key=lambda s: s.rank):
            while sequence.slot >= 0 and self.pool.num_free == 0:
                if self.cache is None or not self.cache.evict(1):
                    self._preempt(self.running()[-1])
            if sequence.slot >= 0:
                self._add_pages(sequence, 1)
        self._widen_responses()

    def _widen_responses(self) -> None:
        slots = self.slots
        if slots.is_ready.any():
            slots.widen_responses(int(slots.num_response[slots.is_ready].max()) + 1)

    def _preempt(self, sequence: Sequence) -> None:
        sequence.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._release(sequence)
        self._enqueue(sequence)

    def _compact(self) -> None:
        """Move pages from the far end into holes, so that attention reads few pages that no row owns."""
        num_used = int(self.slots.num_pages.sum())
        if num_used == 0 or self.pool.num_free == 0:
            return
        end = self._page_layout(np.flatnonzero(self.slots.is_ready))[0].size
        if end <= num_used + num_used // 4 + 8:
            return
        pages, width = self.slots.pages, self.slots.pages.shape[1]
        held = pages[np.arange(width) < self.slots.num_pages[:, None]]
        num_moves = min(MAX_MOVES_PER_STEP, held.size)
        farthest = np.sort(np.partition(held, -num_moves)[-num_moves:])[::-1]
        sources, targets = [], []
        for page in farthest.tolist():
            hole = self.pool.lowest_free()
            if hole is None or hole > page:
                break
            target = self.pool.take_lowest()
            slot, idx = int(self._page_slot[page]), int(self._page_idx[page])
            sequence = self.slots.sequences[slot]
            assert sequence is not None
            sequence.pages[idx] = target
            self.slots.pages[slot, idx] = target
            self._page_slot[target], self._page_idx[target] = slot, idx
            sources.append(page)
            targets.append(target)
        # Only now do the sources become free: within one copy no page is both source and target.
        self.pool.copy(sources, targets)
        self.pool.give_back(sources)
        self._layout = None

    # ---- rows and pages of a step

    def _choose_spans(self, first_row: int, budget: int) -> tuple[tuple[PrefillSpan, ...], list[Ids]]:
        spans: list[PrefillSpan] = []
        token_ids: list[Ids] = []
        if budget <= 0 or self.num_running == int(self.slots.is_ready.sum()):
            return (), []
        for sequence in self.running():
            slot = sequence.slot
            if self.slots.is_ready[slot] or sequence.leader is not None:
                continue
            if budget <= 0:
                break
            start, end = sequence.num_computed, int(self.slots.position[slot])
            num_tokens = min(budget, end - start)
            num_pages = -(-(start + num_tokens) // self.page_tokens)
            spans.append(
                PrefillSpan(
                    sequence, first_row, start, num_tokens, np.array(sequence.pages[:num_pages], np.int64)
                )
            )
            token_ids.append(self._known_ids(sequence)[start : start + num_tokens])
            first_row += num_tokens
            budget -= num_tokens
        return tuple(spans), token_ids

    def _page_layout(self, ready: Indices) -> tuple[Indices, Indices, Indices, Indices]:
        """(owner, start, lists, list starts) of the pages that the ready rows read, as in `StepRows`."""
        if self._layout is not None:
            return self._layout
        counts = self.slots.position[ready] // self.page_tokens + 1
        table = self.slots.pages[ready, : int(counts.max(initial=0))]
        lists = table[np.arange(table.shape[1]) < counts[:, None]]
        list_starts = np.cumsum(counts) - counts
        # At least two: a batch of one product is computed by another kernel, with other rounding.
        num_pages = max(2, int(lists.max(initial=-1)) + 1)
        owner, start = np.zeros(num_pages, np.int64), np.zeros(num_pages, np.int64)
        owner[lists] = np.repeat(np.arange(len(ready)), counts)
        start[lists] = self._page_idx[lists] * self.page_tokens
        self._layout = (owner, start, lists, list_starts)
        return self._layout

    # ---- the end of a sequence

    def _known_ids(self, sequence: Sequence) -> Ids:
        num_response = self._num_response(sequence)
        response = (
            self.slots.response_ids[sequence.slot, :num_response]
            if sequence.slot >= 0
            else sequence.response_ids
        )
        return np.concatenate([sequence.request.prompt_ids, response]).astype(np.int32, copy=False)

    def _meets_own_stop(self, slot: int) -> bool:
        sequence = self.slots.sequences[slot]
        assert sequence is not None
        sampling = sequence.request.sampling
        if int(self.slots.last_token[slot]) in sampling.stop_token_ids:
            return True
        if not sampling.stop_strings or self.decode_text is None:
            return False
        sampled = self.slots.response_ids[slot, : int(self.slots.num_response[slot])]
        return meets_stop_string(sequence.request, sampled, self.decode_text)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Response:
        if sequence.slot >= 0:
            self._save_response(sequence)
            self._keep_prefix(sequence, is_whole=reason is not FinishReason.ABORTED)
        response = Response(
            request_id=sequence.request.request_id,
            response_ids=sequence.response_ids,
            logprobs=sequence.logprobs,
            version_runs=self._version_runs(sequence),
            finish_reason=reason,
            num_cached_prompt_tokens=sequence.num_cached,
            num_preemptions=sequence.num_preemptions,
            replica_id=self.replica_id,
            kv_starts=tuple(sequence.kv_starts),
        )
        self._end(sequence)
        return response

    def _keep_prefix(self, sequence: Sequence, *, is_whole: bool) -> None:
        """Leave to the cache what a later request may begin with: the next turn or the rest of the response with all of
        it, else other members of its group with the prompt."""
        num_kept = self._num_computed(sequence)
        if is_whole and sequence.request.is_last_turn:
            num_kept = min(num_kept, sequence.num_prompt)
        if self.cache is not None and sequence.kv_version == self.weight_version and num_kept > 0:
            num_pages = -(-num_kept // self.page_tokens)
            self.cache.keep(self._known_ids(sequence)[:num_kept], sequence.pages[:num_pages])

    def _fail_not_finite(self, sequence: Sequence) -> Failed:
        error = EngineError(
            f"request {sequence.request.request_id}: the logprob of response token "
            f"{self._num_response(sequence) - 1} is not finite under weight version {self.weight_version}",
            "the weights hold NaN or infinities, or bfloat16 overflowed: look at the last update's gradient norm",
        )
        self._end(sequence)
        return Failed(sequence.request.request_id, error)

    def _version_runs(self, sequence: Sequence) -> tuple[VersionRun, ...]:
        starts = [start for start, _ in sequence.version_starts[1:]]
        ends = [*starts, len(sequence.response_ids)]
        runs = []
        for (start, version), end in zip(sequence.version_starts, ends, strict=True):
            if end > start:
                runs.append(VersionRun(version, end - start))
        return tuple(runs)

    def _has_begun(self, sequence: Sequence) -> bool:
        """Whether it is between two sampled tokens: else its keys and values are of use to no token sampled yet. Who
        leads or follows in a prefill never is."""
        return bool(self.slots.is_ready[sequence.slot]) and self._num_response(sequence) > 0

    def _save_response(self, sequence: Sequence) -> None:
        slot, count = sequence.slot, self._num_response(sequence)
        sequence.response_ids = self.slots.response_ids[slot, :count].copy()
        sequence.logprobs = self.slots.logprobs[slot, :count].copy()

    def _restart(self, sequences: list[Sequence]) -> None:
        """Their keys and values are void; they keep slots, pages and tokens."""
        for sequence in sequences:
            sequence.leader, sequence.followers = None, []
            sequence.num_computed = 0
            self._note_start(sequence)
            self.slots.is_ready[sequence.slot] = False
        for sequence in sequences:
            self._reuse_prefix(sequence)
            self._mark_ready(sequence)

    def _note_start(self, sequence: Sequence) -> None:
        """Keys and values of all its tokens are computed from here on."""
        start = KVStart(self._num_response(sequence), self.weight_version)
        if sequence.kv_starts and sequence.kv_starts[-1].token_idx == start.token_idx:
            sequence.kv_starts.pop()
        sequence.kv_starts.append(start)
        sequence.kv_version = self.weight_version

    def _release(self, sequence: Sequence) -> None:
        """Take slot and pages; tokens are kept."""
        self._save_response(sequence)
        slot = sequence.slot
        self.slots.sequences[slot] = None
        self.slots.is_ready[slot] = False
        self.slots.num_pages[slot] = 0
        self._free_slots.append(slot)
        self.pool.give_back(sequence.pages)
        sequence.pages = []
        siblings = self._siblings.get(sequence.prompt_key)
        if siblings is not None and sequence in siblings:
            siblings.remove(sequence)
            if not siblings:
                del self._siblings[sequence.prompt_key]
        if sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
            sequence.leader = None
        if sequence.followers:
            heir, *rest = sequence.followers
            heir.leader, heir.followers = None, rest
            for follower in rest:
                follower.leader = heir
            sequence.followers = []
        sequence.slot = -1
        self._layout = None

    def _end(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            self._release(sequence)
        else:
            self._num_waiting -= 1  # its entry in the heap is skipped when it comes up
        sequence.is_done = True
        del self.by_request[sequence.request.request_id]
