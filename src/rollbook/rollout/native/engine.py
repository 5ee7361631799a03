"""The asyncio face of the native engine, and the step that its thread takes.

One thread per engine (`rollout/thread.py`) plans, runs and books steps without pause while there is work; between two
steps it carries out what the event loop asked for (requests, pauses, weight publications). Nothing but that thread
changes scheduler, model or pool; counters are read from the event loop, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal, TypeVar

import torch

from rollbook.errors import DeadlineError, EngineError, RunError
from rollbook.modeling.load import LoadedModel
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.engine import EngineStats, GenerateRequest, KVPolicy, PauseMode, Response
from rollbook.rollout.native.draws import uniforms
from rollbook.rollout.native.mismatch import RoundedCopy
from rollbook.rollout.native.model_runner import ModelRunner, engine_model
from rollbook.rollout.native.sampling import Draws
from rollbook.rollout.native.scheduler import Scheduler
from rollbook.rollout.native.sequences import StepRows
from rollbook.rollout.pauses import Pauses
from rollbook.rollout.stops import TextDecoder
from rollbook.rollout.thread import Answer, Command, EngineThread, give_all
from rollbook.weights import LiveWeights

Result = TypeVar("Result")

CLOSE_DEADLINE_S = 60.0
"""How long `close` waits for the step that runs."""


class NativeEngine:
    """Continuous batching on a Hugging Face causal LM; implements `rollbook.rollout.engine.Engine`.

    Args:
        model: its weights are copied, unless `share_weights`: then the engine computes with this model's own memory
            (same dtype and device) and a trainer's update reaches it without a copy. It is never modified.
        eos_token_ids: tokens that end a response. Nothing is read from the model's generation config.
        tokenizer: only for stop strings.
        weight_version: of the weights `model` holds now.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: RolloutConfig,
        *,
        replica_id: int = 0,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: TextDecoder | None = None,
        share_weights: bool = False,
        weight_version: int = 0,
    ) -> None:
        self.replica_id = replica_id
        self.config = config
        self.share_weights = share_weights
        self._given_model: LoadedModel | None = model
        facts = model.facts
        dtype = str(model.dtype).removeprefix("torch.") if config.dtype == "auto" else config.dtype
        if config.batch_invariant and (facts.num_experts > 1 or config.device != "cpu" or dtype != "float32"):
            raise EngineError(
                f"rollout.batch_invariant is set and the model is {facts.model_type} with {facts.num_experts} "
                f"expert(s) in {dtype} on {config.device}",
                "it needs float32 on a CPU and a model without experts: elsewhere rounding depends on the neighbors",
            )
        self._scheduler = Scheduler(
            num_slots=config.num_slots,
            num_pages=config.kv_pool_tokens // config.page_tokens,
            page_tokens=config.page_tokens,
            max_prefill_tokens=config.max_prefill_tokens,
            max_context_tokens=facts.max_position,
            use_prefix_cache=config.prefix_cache,
            most_rows=config.num_slots if config.batch_invariant else None,
            eos_token_ids=eos_token_ids,
            decode_text=None if tokenizer is None else tokenizer.decode,
            weight_version=weight_version,
            replica_id=replica_id,
        )
        if config.mismatch != "none" and share_weights:
            raise EngineError(
                f"rollout.mismatch is '{config.mismatch}' and the engine shares the trainer's weights",
                "rounding them would change the trainer: make the engine without share_weights",
            )
        self._runner: ModelRunner | None = None
        self._rounded: RoundedCopy | None = None
        self._pending: dict[str, Answer[Response]] = {}
        """Requests whose callers wait on an event loop."""
        self._sleep_level = 0
        self._needs_publication = False
        self._prefill_s = 0.0
        self._decode_s = 0.0
        self._thread = EngineThread(f"the engine of replica {replica_id}", self)
        self._pauses = Pauses(self._thread, abort=lambda: self._respond(self._scheduler.abort_all()))

    # ---- life

    async def start(self) -> None:
        """Build the model's engine copy and the KV pool on the engine's thread.

        Raises:
            EngineError: the model can't run here; says why.
        """
        await self._thread.start(self._build)

    async def close(self) -> None:
        """End the thread after the step that runs; whoever waits for a response gets an EngineError."""
        await self._thread.close(CLOSE_DEADLINE_S)

    # ---- requests

    async def generate(self, request: GenerateRequest) -> Response:
        """Sample one response.

        Raises:
            EngineError: the request can't fit, or its logprobs are not finite.
            EngineDownError: the engine failed or was closed.
            DeadlineError: it took longer than rollout.response_deadline_s.
        """
        answer = Answer[Response]()
        self._thread.post(Command(lambda: self._submit(request, answer), answer.fail))
        try:
            async with asyncio.timeout(self.config.response_deadline_s):
                return await answer.future
        except TimeoutError:
            self._forget(request.request_id, answer)
            raise DeadlineError(
                f"request {request.request_id} has no response after {self.config.response_deadline_s:g} s: replica "
                f"{self.replica_id} runs {self._scheduler.num_running} and queues {self._scheduler.num_waiting}",
                "raise rollout.response_deadline_s, or look for a pause that was never resumed",
            ) from None
        except asyncio.CancelledError:
            self._forget(request.request_id, answer)
            raise

    def _submit(self, request: GenerateRequest, answer: Answer[Response]) -> None:
        if answer.future.cancelled():
            return
        try:
            self._scheduler.submit(request)
        except EngineError as error:
            answer.fail(error)
        else:
            self._pending[request.request_id] = answer

    def _forget(self, request_id: str, answer: Answer[Response]) -> None:
        def forget() -> None:
            if self._pending.get(request_id) is answer:
                del self._pending[request_id]
                self._scheduler.cancel(request_id)

        self._thread.post(Command(forget, lambda error: None))

    # ---- pauses, sleep, weights

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Returns when no step runs. Requests that come while paused are queued.

        keep: running sequences go on after `resume`. abort: every request, queued ones too, returns the tokens it
        has. drain: what was started finishes first.
        """
        await self._pauses.begin(mode)

    async def give_back(self, num_requests: int) -> None:
        """The requests whose turn would come last return the tokens they have, for another replica to go on with."""
        await self._thread.ask(lambda: self._respond(self._scheduler.abort_last(num_requests)))

    async def resume(self) -> None:
        await self._pauses.end()

    async def sleep(self, level: int = 1) -> None:
        """Give memory back. Running sequences keep their tokens and are recomputed after `wake`.

        1: the KV pool is dropped, an accelerator's weights go to host memory. 2: weights are dropped as well. Shared
        weights belong to the trainer and stay where they are.
        """
        if level not in (1, 2):
            raise EngineError(f"sleep level {level} does not exist", "use 1 or 2")

        def sleep() -> None:
            runner = self._running()
            if self._sleep_level == 0:
                self._scheduler.drop_kv()
                runner.drop_pool()
            if level > self._sleep_level:
                if not self.share_weights:
                    runner.put_weights_to_sleep(level)
                self._sleep_level = level
                self._needs_publication |= level == 2

        await self._thread.ask(sleep)

    async def wake(self) -> None:
        """Rebuild what `sleep` dropped, and serve, unless a pause is on. After level 2 nothing is served until
        `adopt_version` says that a publication wrote every weight."""

        def wake() -> None:
            if self._sleep_level == 0:
                return
            runner = self._running()
            if not self.share_weights:
                runner.wake_weights()
            runner.make_pool()
            self._sleep_level = 0

        await self._thread.ask(wake)

    async def run_between_steps(self, fn: Callable[[], Result]) -> Result:
        """Run `fn` on the engine's thread while no step runs. Its exception is raised here and harms nothing else."""
        return await self._thread.ask(fn)

    async def adopt_version(self, weight_version: int, kv_policy: KVPolicy | None = None) -> None:
        """From the next step on tokens are labeled `weight_version`, whose weights the caller has written.

        Cached prefixes are dropped. `kv_policy` (the config's when None) decides about running sequences: "keep" goes
        on with the keys and values they have, "recompute" computes them again; logprobs already reported stay.
        Sequences without a token yet are computed anew under the new weights either way.

        Raises:
            EngineError: the version would run backwards.
        """

        def adopt() -> None:
            self._scheduler.adopt_version(weight_version, kv_policy or self.config.kv_policy)
            if self._rounded is not None:
                self._rounded.refresh()
            self._needs_publication = False

        await self._thread.ask(adopt)

    async def live_weights(self) -> LiveWeights:
        """The live parameters; use them inside `run_between_steps` only."""
        return await self._thread.ask(lambda: self._running().weights)

    def device_tensors(self) -> dict[Literal["rollout weights", "KV pool"], list[torch.Tensor]]:
        """What it holds now, by owner, for a count of a device's memory."""
        runner = self._runner
        return (
            {}
            if runner is None
            else {"rollout weights": runner.weight_tensors(), "KV pool": runner.pool_tensors()}
        )

    async def weight_version(self) -> int:
        return self._scheduler.weight_version

    async def reset_prefix_cache(self) -> None:
        await self._thread.ask(self._scheduler.reset_cache)

    async def stats(self) -> EngineStats:
        """Read without waiting for the step that runs, so that a slow step can't hold up a deadline message."""
        scheduler, counters = self._scheduler, self._scheduler.counters
        return EngineStats(
            weight_version=scheduler.weight_version,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_slots=scheduler.num_slots,
            kv_pool_tokens=scheduler.pool.num_pages * scheduler.page_tokens,
            kv_used_tokens=scheduler.used_tokens,
            prefill_tokens=counters.prefill_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            decode_tokens=counters.decode_tokens,
            decode_steps=counters.decode_steps,
            num_preemptions=counters.num_preemptions,
            busy_s=self._prefill_s + self._decode_s,
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
            active_slots_sum=counters.active_slots_sum,
            kv_used_tokens_sum=counters.kv_used_tokens_sum,
            mismatch=self.config.mismatch,
            mismatch_error_frac=0.0 if self._rounded is None else self._rounded.error_frac,
            waiting_requests=tuple(list(self._pending)[:32]),
        )

    # ---- the engine's thread

    def ended(self, error: RunError) -> None:
        self._pauses.fail(error)
        give_all((answer, error) for answer in self._pending.values())
        self._pending.clear()
        self._runner = None

    def _build(self) -> None:
        model, config = self._given_model, self.config
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        assert model is not None, "an engine starts once"
        dtype = model.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        own = engine_model(
            model, dtype=dtype, device=torch.device(config.device), share_weights=self.share_weights
        )
        if config.mismatch != "none":
            self._rounded = RoundedCopy(own, config.mismatch)
        self._runner = ModelRunner(
            own if self._rounded is None else self._rounded.model,
            live=own,
            num_pages=self._scheduler.pool.num_pages,
            page_tokens=config.page_tokens,
            invariant_rows=self._scheduler.most_rows,
            graph_rows=config.num_slots if config.cuda_graphs and not config.batch_invariant else 0,
        )
        self._given_model = None

    def _running(self) -> ModelRunner:
        assert self._runner is not None, "commands are answered only after _build"
        return self._runner

    def step(self) -> bool:
        """One step, if anything can run."""
        scheduler, pauses = self._scheduler, self._pauses
        if pauses.is_draining and not scheduler.has_started():
            pauses.drained()
        if pauses.is_on or self._sleep_level or self._needs_publication or not self._pending:
            return False
        began_at_s = time.perf_counter()
        runner = self._running()
        plan = scheduler.plan(starts_new=not pauses.is_draining)
        if plan is None:
            return False
        assert runner.pool is not None
        runner.pool.carry_out(scheduler.pool.operations)
        scheduler.pool.operations.clear()
        token_ids, logprobs = runner.step(plan, self._draws(plan))
        finished, failed = scheduler.commit(plan, token_ids, logprobs)
        elapsed_s = time.perf_counter() - began_at_s
        decode_s = elapsed_s * plan.num_decode / plan.num_rows
        self._decode_s += decode_s
        self._prefill_s += elapsed_s - decode_s
        # Whoever is woken by these may read the counters: seconds must be there with their tokens.
        self._respond(finished)
        give_all((self._pending.pop(item.request_id), item.error) for item in failed)
        return True

    def _draws(self, plan: StepRows) -> Draws:
        rows, slots = plan.slots, self._scheduler.slots
        token_idx = slots.first_token_idx[rows] + slots.num_response[rows]
        return Draws(
            temperature=slots.temperature[rows],
            top_p=slots.top_p[rows],
            top_k=slots.top_k[rows],
            min_p=slots.min_p[rows],
            uniform=uniforms(slots.key[rows], token_idx),
        )

    def _respond(self, responses: list[Response]) -> None:
        give_all((self._pending.pop(response.request_id), response) for response in responses)
