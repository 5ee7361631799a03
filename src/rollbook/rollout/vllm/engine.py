"""The asyncio face of vLLM, and the thread that drives its engine core.

    event loop ──(commands)──► engine thread: commands between steps · hand over · step · book tokens
                                    │
                                 VllmCore (core.py) ── in this process, or in vLLM's own processes

Between two commands that were queued together no step runs; while a command runs, none is on its way (`freeze`). Each
token is booked under the version that was live when its step ran, so that labels are exact in both modes.

Requests wait in our own queue and are handed to vLLM as slots become free. Prefixes are shared through vLLM's cache
under a salt that changes with every publication: blocks of older weights can't be hit, even while sequences that
began before still hold them.

What vLLM allows and what not:
- Logprobs are ln p under temperature-scaled logits before top-k, top-p and min-p. vLLM can report them either before
  temperature or after everything; requests for which the mode chosen at the start gives another number are refused.
- Draws depend on (seed, group, member) and the position with vLLM's second model runner (CUDA, dense models): a
  partial response continued later samples what it would have sampled. With the first runner they come from one
  generator per request, seeded by (seed, group, member, first_token_idx): the same request repeats, a continued one
  draws anew.
- Numbers depend on the batch in the last digits; `rollout.batch_invariant` is refused.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from rollbook.errors import DeadlineError, EngineDownError, EngineError, RunError
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.engine import (
    EngineStats,
    GenerateRequest,
    KVPolicy,
    PauseMode,
    Response,
    require_runnable,
)
from rollbook.rollout.logprobs_mode import LogprobsMode, reports_ours
from rollbook.rollout.native.draws import sequence_key
from rollbook.rollout.pauses import Pauses
from rollbook.rollout.stops import TextDecoder, meets_stop_string
from rollbook.rollout.thread import Answer, Command, EngineThread, give_all
from rollbook.rollout.vllm.config import VllmConfig
from rollbook.rollout.vllm.core import CoreOptions, CoreOutput, CoreRequest, CoreStep, Finish, VllmCore
from rollbook.types import FinishReason, SamplingParams, VersionRun
from rollbook.weights import LiveWeights

Result = TypeVar("Result")

CLOSE_DEADLINE_S = 120.0
"""How long `close` waits for the step that runs and vLLM's shutdown."""
MIN_TEMPERATURE = 0.01
"""vLLM raises smaller ones to this, silently."""
SEED_MASK = (1 << 63) - 1


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request whose caller waits on the event loop."""

    request: GenerateRequest
    answer: Answer[Response]
    core_id: str = ""
    """Empty while it waits in our queue; a new one each time it is handed over."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_starts: list[tuple[int, int]] = field(default_factory=list)
    """(token index, version sampled from there on)."""
    num_handed_over: int = 0
    """Tokens it had when it was handed over last."""
    num_cached: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class _Counters:
    prefill_tokens: int = 0
    cached_prompt_tokens: int = 0
    decode_tokens: int = 0
    decode_steps: int = 0
    num_preemptions: int = 0
    active_slots_sum: int = 0
    kv_used_frac_sum: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    kv_used_frac: float = 0.0
    core_running: int = 0


class VllmEngine:
    """vLLM as one replica; implements `rollbook.rollout.engine.Engine` and what a publication needs.

    Args:
        model_folder: config.json and weights (`LoadedModel.save` writes one); nothing is read from its generation
            config.
        eos_token_ids: tokens that end a response.
        tokenizer: only for stop strings.
        weight_version: of the weights in the folder. With `load_format = "dummy"` nothing is served before a
            publication.
    """

    def __init__(
        self,
        model_folder: str | Path,
        config: RolloutConfig,
        options: VllmConfig | None = None,
        *,
        replica_id: int = 0,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: TextDecoder | None = None,
        weight_version: int = 0,
    ) -> None:
        self.replica_id = replica_id
        self.config = config
        self.options = options or VllmConfig()
        if config.batch_invariant or config.mismatch != "none":
            raise EngineError(
                'rollout.batch_invariant or rollout.mismatch is set and rollout.engine is "vllm"',
                'only rollout.engine = "native" has them',
            )
        self.logprobs_mode: LogprobsMode = _logprobs_mode(config.sampling())
        self._core_options = CoreOptions(
            model_folder=str(model_folder),
            replica_id=replica_id,
            dtype=config.dtype,
            device=config.device,
            in_process=self.options.in_process,
            tp_size=self.options.tp_size,
            logprobs_mode=self.logprobs_mode,
            num_slots=config.num_slots,
            kv_pool_tokens=config.kv_pool_tokens,
            max_prefill_tokens=config.max_prefill_tokens,
            max_context_tokens=self.options.max_context_tokens,
            prefix_cache=config.prefix_cache,
            load_format=self.options.load_format,
            compile=self.options.compile,
            sleep_mode=self.options.sleep_mode,
            trust_remote_code=self.options.trust_remote_code,
            call_deadline_s=self.options.call_deadline_s,
        )
        self._eos_token_ids = eos_token_ids
        self._tokenizer = tokenizer
        self._weight_version = weight_version
        self._needs_publication = self.options.load_format == "dummy"
        self._core: VllmCore | None = None
        self._queue: deque[_Sequence] = deque()
        self._running: dict[str, _Sequence] = {}
        """By core id."""
        self._by_request: dict[str, _Sequence] = {}
        """Everything not finished."""
        self._num_handed_over = 0
        self._salt_epoch = 0
        self._counters = _Counters()
        self._sleep_level = 0
        self._unbooked_s = 0.0
        """Waited for a core in its own process since tokens came last."""

        self._thread = EngineThread(f"vLLM of replica {replica_id}", self)
        self._pauses = Pauses(self._thread, abort=self._abort_all, freeze=self._freeze)

    # ---- life

    async def start(self) -> None:
        """Load the model and build vLLM's engine core on the engine's thread.

        Raises:
            EngineError: vLLM is missing or can't run this model here; says why.
        """
        try:
            await self._thread.start(self._build)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the thread after the step that runs, and vLLM; whoever waits for a response gets an EngineError."""
        await self._thread.close(CLOSE_DEADLINE_S)

    # ---- requests

    async def generate(self, request: GenerateRequest) -> Response:
        """Sample one response.

        Raises:
            EngineError: the request can't run here, its logprobs are not finite, or the engine failed or was closed.
            DeadlineError: it took longer than rollout.response_deadline_s.
        """
        sequence = _Sequence(request, Answer())
        self._thread.post(Command(lambda: self._submit(sequence), sequence.answer.fail))
        try:
            async with asyncio.timeout(self.config.response_deadline_s):
                return await sequence.answer.future
        except TimeoutError:
            self._forget(sequence)
            raise DeadlineError(
                f"request {request.request_id} has no response after {self.config.response_deadline_s:g} s: replica "
                f"{self.replica_id} runs {len(self._running)} and queues {len(self._queue)}",
                "raise rollout.response_deadline_s, or look for a pause that was never resumed",
            ) from None
        except asyncio.CancelledError:
            self._forget(sequence)
            raise

    def _submit(self, sequence: _Sequence) -> None:
        if sequence.answer.future.cancelled():
            return
        try:
            self._check(sequence.request)
        except EngineError as error:
            sequence.answer.fail(error)
        else:
            self._by_request[sequence.request.request_id] = sequence
            self._queue.append(sequence)

    def _check(self, request: GenerateRequest) -> None:
        core, sampling = self._built(), request.sampling
        name = request.request_id
        require_runnable(
            request,
            is_running=name in self._by_request,
            max_context_tokens=core.model_context_tokens,
            has_tokenizer=self._tokenizer is not None,
        )
        most = min(len(request.prompt_ids) + sampling.max_response_tokens, core.model_context_tokens)
        if most > core.max_context_tokens:
            raise EngineError(
                f"request {name} may need {most} tokens of keys and values and the pool holds "
                f"{core.max_context_tokens}",
                "raise rollout.kv_pool_tokens or lower rollout.max_response_tokens",
            )
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise EngineError(
                f"request {name}: vLLM would raise its temperature of {sampling.temperature:g} to {MIN_TEMPERATURE}",
                "use 0 for greedy sampling",
            )
        if not reports_ours(self.logprobs_mode, sampling):
            raise EngineError(
                f"request {name} has temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k "
                f"{sampling.top_k}, min_p {sampling.min_p:g}, and this engine was started with vLLM's "
                f"{self.logprobs_mode}, which is another number than ln p before top-k, top-p and min-p",
                "filter tokens at temperature 1 in all requests of the engine (its [rollout] too), or use neither "
                'top-k, top-p nor min-p; rollout.engine = "native" has no such limit',
            )

    def _forget(self, sequence: _Sequence) -> None:
        def forget() -> None:
            if self._by_request.get(sequence.request.request_id) is sequence:
                self._remove(sequence)

        self._thread.post(Command(forget, lambda error: None))

    # ---- pauses, sleep, weights

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Returns when no step runs. Requests that come while paused are queued.

        keep: running sequences go on after `resume`. abort: every request, queued ones too, returns the tokens it
        has. drain: what was handed to vLLM finishes first.
        """
        await self._pauses.begin(mode)

    def _abort_all(self) -> None:
        sequences = list(self._by_request.values())
        for sequence in sequences:
            self._remove(sequence)
        give_all((s.answer, self._response(s, FinishReason.ABORTED)) for s in sequences)

    async def resume(self) -> None:
        await self._pauses.end()

    async def sleep(self, level: int = 1) -> None:
        """Give memory back. Running sequences keep their tokens and are recomputed after `wake`.

        On CUDA 1: weights to host memory, KV pool dropped; 2: both dropped. On a CPU vLLM has no sleep: only the
        state changes, and level 2 still asks for a publication.
        """
        if level not in (1, 2):
            raise EngineError(f"sleep level {level} does not exist", "use 1 or 2")

        def sleep() -> None:
            if level <= self._sleep_level:
                return
            core = self._built()
            self._freeze()
            if self._sleep_level:  # vLLM changes levels only awake
                self._book(core.wake())
            if level == 2:
                # A core in its own process runs on by itself when it wakes, before new weights have come.
                self._requeue(list(self._running.values()))
            core.sleep(level)
            self._sleep_level = level
            self._needs_publication |= level == 2

        await self._thread.ask(sleep)

    async def wake(self) -> None:
        """Take the memory back, and serve, unless a pause is on. After level 2 nothing is served until
        `adopt_version` says that a publication wrote every weight."""

        def wake() -> None:
            if self._sleep_level == 0:
                return
            self._sleep_level = 0
            self._book(self._built().wake())

        await self._thread.ask(wake)

    async def run_between_steps(self, fn: Callable[[], Result]) -> Result:
        """Run `fn` on the engine's thread while no step runs. Its exception is raised here and harms nothing else."""

        def run() -> Result:
            self._freeze()
            return fn()

        return await self._thread.ask(run)

    async def adopt_version(self, weight_version: int, kv_policy: KVPolicy | None = None) -> None:
        """From the next step on tokens are labeled `weight_version`, whose weights the caller has written.

        Cached prefixes are no longer used. `kv_policy` (the config's when None) decides about running sequences:
        "keep" goes on with the keys and values they have, "recompute" computes them again; logprobs already reported
        stay. Sequences that wait for the first token of their prefill start anew under the new weights either way, and
        so do all where weights were written again under the same version: nobody knows what they were in between.

        Raises:
            EngineError: the version would run backwards.
        """
        await self._thread.ask(lambda: self.adopt_on_thread(weight_version, kv_policy))

    def adopt_on_thread(self, weight_version: int, kv_policy: KVPolicy | None = None) -> None:
        """`adopt_version` for callers inside `run_between_steps`."""
        if weight_version < self._weight_version:
            raise EngineError(
                f"replica {self.replica_id} holds version {self._weight_version} and was told to adopt "
                f"{weight_version}",
                "versions only grow",
            )
        core = self._built()
        self._freeze()
        self._salt_epoch += 1
        self._requeue([s for s in self._running.values() if len(s.token_ids) == s.num_handed_over])
        is_rewritten = weight_version == self._weight_version
        if not self._running:
            core.drop_prefixes()
        elif is_rewritten or (kv_policy or self.config.kv_policy) == "recompute":
            core.recompute_running()
        core.label(weight_version)
        self._weight_version = weight_version
        self._needs_publication = False

    async def live_weights(self) -> LiveWeights:
        """The live parameters; use them inside `run_between_steps` only.

        Raises:
            EngineError: vLLM runs in processes of its own (publish through `VllmPort`), or holds parameters in a
                layout that cannot be named.
        """
        from rollbook.rollout.vllm.weights import VllmWeights

        return await self._thread.ask(lambda: VllmWeights(self._built().model))

    def device_tensors(self) -> dict[Literal["rollout weights", "KV pool"], list[torch.Tensor]]:
        """What vLLM holds in this process now, by owner; nothing while it sleeps, or in processes of its own."""
        core = self._core
        if core is None or self._sleep_level or not self.options.in_process:
            return {}
        weights = [parameter.detach() for parameter in core.model.parameters()]
        return {"rollout weights": weights, "KV pool": core.kv_tensors()}

    async def ask_workers(self, method: str, *args: str | bytes) -> list[Any]:
        """A method of the worker extension on every rank; generation goes on beside it."""
        return await self._thread.ask(lambda: self.ask_workers_on_thread(method, *args))

    def ask_workers_on_thread(self, method: str, *args: str | bytes) -> list[Any]:
        return self._built().ask_workers(method, *args)

    async def weight_version(self) -> int:
        return self._weight_version

    async def reset_prefix_cache(self) -> None:
        """Prefixes computed so far are not used again, running sequences' included."""

        def reset() -> None:
            self._freeze()
            self._salt_epoch += 1
            if not self._running:
                self._built().drop_prefixes()

        await self._thread.ask(reset)

    async def stats(self) -> EngineStats:
        """Read without waiting for the step that runs.

        A step's seconds are split between prefill and decode by the sequences that got their first or a later token;
        `kv_used_tokens` is vLLM's gauge after the last step.
        """
        core, counters = self._core, self._counters
        pool = 0 if core is None else core.kv_pool_tokens
        num_open = len(self._running)
        num_running = min(num_open, counters.core_running)
        return EngineStats(
            weight_version=self._weight_version,
            num_running=num_running,
            num_waiting=len(self._queue) + num_open - num_running,
            num_slots=self.config.num_slots,
            kv_pool_tokens=pool,
            kv_used_tokens=round(counters.kv_used_frac * pool) if num_open else 0,
            prefill_tokens=counters.prefill_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            decode_tokens=counters.decode_tokens,
            decode_steps=counters.decode_steps,
            num_preemptions=counters.num_preemptions,
            busy_s=counters.prefill_s + counters.decode_s,
            prefill_s=counters.prefill_s,
            decode_s=counters.decode_s,
            active_slots_sum=counters.active_slots_sum,
            kv_used_tokens_sum=round(counters.kv_used_frac_sum * pool),
            waiting_requests=tuple(list(self._by_request)[:32]),
        )

    # ---- the engine's thread

    def ended(self, error: RunError) -> None:
        self._pauses.fail(error)
        give_all((sequence.answer, error) for sequence in self._by_request.values())
        self._by_request.clear()
        self._running.clear()
        self._queue.clear()
        core, self._core = self._core, None
        if core is not None:
            core.close()

    def _build(self) -> None:
        if self.config.num_threads:
            torch.set_num_threads(self.config.num_threads)
        self._core = VllmCore(self._core_options)
        self._core.freeze()
        self._core.label(self._weight_version)

    def _built(self) -> VllmCore:
        assert self._core is not None, "commands are answered only after _build"
        return self._core

    def step(self) -> bool:
        """One step, if anything can run."""
        pauses = self._pauses
        if pauses.is_draining and not self._running:
            pauses.drained()
        if pauses.is_on or self._sleep_level or self._needs_publication or not self._by_request:
            return False
        began_at_s = time.perf_counter()
        core = self._built()
        while self._queue and not pauses.is_draining and len(self._running) < self.config.num_slots:
            self._hand_over(core, self._queue.popleft())
        step = core.step()
        self._unbooked_s += time.perf_counter() - began_at_s
        if step.ran:
            began_at_s = time.perf_counter()
            num_first, num_later = self._book([step])
            elapsed_s = self._unbooked_s + time.perf_counter() - began_at_s
            self._unbooked_s = 0.0
            decode_s = elapsed_s * num_later / max(1, num_first + num_later)
            self._counters.decode_s += decode_s
            self._counters.prefill_s += elapsed_s - decode_s
        return True

    def _hand_over(self, core: VllmCore, sequence: _Sequence) -> None:
        request, sampling, num_sampled = sequence.request, sequence.request.sampling, len(sequence.token_ids)
        sequence.core_id = f"{request.request_id}~{self._num_handed_over}"
        self._num_handed_over += 1
        sequence.num_handed_over = num_sampled
        self._running[sequence.core_id] = sequence
        key = sequence_key(request.seed, request.group_id, request.member_idx)
        if not core.draws_by_position:
            key = sequence_key(key, request.first_token_idx + num_sampled, 0)
        eos = () if sampling.ignore_eos else self._eos_token_ids
        # Filters don't change a greedy token, but vLLM would apply them to its logprob.
        is_greedy = sampling.temperature == 0
        core.add(
            CoreRequest(
                core_id=sequence.core_id,
                prompt_ids=[*request.prompt_ids.tolist(), *sequence.token_ids],
                max_tokens=sampling.max_response_tokens - num_sampled,
                temperature=sampling.temperature,
                top_p=1.0 if is_greedy else sampling.top_p,
                top_k=0 if is_greedy else sampling.top_k,
                min_p=0.0 if is_greedy else sampling.min_p,
                seed=key & SEED_MASK,
                stop_token_ids=sorted({*eos, *sampling.stop_token_ids}),
                cache_salt=f"{self._weight_version}.{self._salt_epoch}",
            )
        )

    def _freeze(self) -> None:
        """No step runs or is on its way until the next `step`; tokens on their way are booked first."""
        self._book(self._built().freeze())

    def _book(self, steps: Iterable[CoreStep]) -> tuple[int, int]:
        """Take over the tokens of steps that ran under the current version; returns the number of sequences that got
        their first token, and of those that got a later one."""
        num_first = num_later = 0
        for step in steps:
            if step.num_running is not None:
                self._counters.core_running = step.num_running
            if step.kv_used_frac is not None:
                self._counters.kv_used_frac = step.kv_used_frac
            done: list[tuple[Answer[Response], Response | RunError]] = []
            is_labeled_right = step.weight_version in (None, "default", str(self._weight_version))
            num_later_here = 0
            for output in step.outputs:
                sequence = self._running.get(output.core_id)
                if sequence is None:  # cancelled or handed over anew
                    continue
                if output.token_ids:
                    if not is_labeled_right:
                        raise self._mislabeled(step)
                    self._counters.decode_tokens += len(output.token_ids)
                    if output.num_cached_tokens is None:
                        num_later_here += 1
                    else:
                        num_first += 1
                self._take(sequence, output, done)
            num_later += num_later_here
            if num_later_here:
                self._counters.decode_steps += 1
                self._counters.active_slots_sum += num_later_here
                self._counters.kv_used_frac_sum += self._counters.kv_used_frac
            give_all(done)  # last, so that whoever has a response finds it counted
        return num_first, num_later

    def _mislabeled(self, step: CoreStep) -> EngineDownError:
        return EngineDownError(
            f"vLLM labels tokens with version {step.weight_version}, replica {self.replica_id} serves "
            f"{self._weight_version}",
            "something besides a publication changed vLLM's weights: restart the replica",
        )

    def _take(
        self,
        sequence: _Sequence,
        output: CoreOutput,
        done: list[tuple[Answer[Response], Response | RunError]],
    ) -> None:
        """Runs once per sequence and step: what most steps don't bring is looked at first and quickly."""
        if output.num_cached_tokens is not None:
            self._note_prefill(sequence, output.num_cached_tokens)
        if output.num_preemptions:
            self._counters.num_preemptions += output.num_preemptions
            sequence.num_preemptions += output.num_preemptions
        if output.token_ids:
            if not sequence.version_starts or sequence.version_starts[-1][1] != self._weight_version:
                sequence.version_starts.append((len(sequence.token_ids), self._weight_version))
            sequence.token_ids += output.token_ids
            sequence.logprobs += output.logprobs
        is_finite = math.isfinite(sum(output.logprobs))
        finish = output.finish
        if finish is None and sequence.request.sampling.stop_strings and self._has_stop_string(sequence):
            self._built().abort([sequence.core_id])
            finish = "stop"
        if finish is None and is_finite:
            return
        if finish is None:
            self._built().abort([sequence.core_id])
        del self._running[sequence.core_id]
        del self._by_request[sequence.request.request_id]
        done.append((sequence.answer, self._outcome(sequence, finish, is_finite)))

    def _note_prefill(self, sequence: _Sequence, num_cached: int) -> None:
        num_prompt = len(sequence.request.prompt_ids) + len(sequence.token_ids)
        self._counters.cached_prompt_tokens += num_cached
        self._counters.prefill_tokens += num_prompt - num_cached
        if not sequence.token_ids:
            sequence.num_cached = num_cached

    def _outcome(self, sequence: _Sequence, finish: Finish | None, is_finite: bool) -> Response | RunError:
        name, num_tokens = sequence.request.request_id, len(sequence.token_ids)
        if not is_finite:
            return EngineError(
                f"request {name}: the logprob of token {num_tokens - 1} is not finite",
                "the weights or the activations overflow: look at the last update, or use another dtype",
            )
        if finish == "stop":
            return self._response(sequence, FinishReason.STOP)
        if finish == "length":
            return self._response(sequence, FinishReason.LENGTH)
        return EngineError(
            f"vLLM ended request {name} by itself ({finish}) after {num_tokens} tokens", "look at vLLM's log"
        )

    def _has_stop_string(self, sequence: _Sequence) -> bool:
        """Asked here and not of vLLM, which knows nothing of what was sampled before a cut."""
        assert self._tokenizer is not None, "checked when the request came"
        return meets_stop_string(sequence.request, sequence.token_ids, self._tokenizer.decode)

    def _response(self, sequence: _Sequence, reason: FinishReason) -> Response:
        starts = [*sequence.version_starts, (len(sequence.token_ids), -1)]
        return Response(
            request_id=sequence.request.request_id,
            response_ids=np.array(sequence.token_ids, np.int32),
            logprobs=np.array(sequence.logprobs, np.float32),
            version_runs=tuple(
                VersionRun(version, end - start) for (start, version), (end, _) in itertools.pairwise(starts)
            ),
            finish_reason=reason,
            num_cached_prompt_tokens=sequence.num_cached,
            num_preemptions=sequence.num_preemptions,
            replica_id=self.replica_id,
        )

    def _remove(self, sequence: _Sequence) -> None:
        del self._by_request[sequence.request.request_id]
        if sequence.core_id in self._running:
            del self._running[sequence.core_id]
            self._built().abort([sequence.core_id])
        else:
            self._queue.remove(sequence)

    def _requeue(self, sequences: list[_Sequence]) -> None:
        """Take sequences back from vLLM, to be handed over anew with the tokens they have, before all others."""
        self._built().abort([sequence.core_id for sequence in sequences])
        for sequence in sequences:
            del self._running[sequence.core_id]
            sequence.core_id = ""
        self._queue.extendleft(reversed(sequences))


def _logprobs_mode(sampling: SamplingParams) -> LogprobsMode:
    modes: tuple[LogprobsMode, ...] = ("processed_logprobs", "raw_logprobs")
    for mode in modes:
        if reports_ours(mode, sampling):
            return mode
    raise EngineError(
        f"rollout has temperature {sampling.temperature:g} with top_p {sampling.top_p:g}, top_k {sampling.top_k}, "
        f"min_p {sampling.min_p:g}: vLLM cannot report the logprobs a trainer recomputes",
        "it reports them before temperature or after the filters: set rollout.temperature = 1, or remove the "
        'filters, or use rollout.engine = "native"',
    )
