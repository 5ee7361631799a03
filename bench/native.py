"""The native engine against this machine's roofline and against Hugging Face generate.

    python bench/native.py                  # everything, about ten minutes on two quiet cores
    python bench/native.py decode           # decode tokens/s at 1, 16, 64, 256 slots beside the floor of the same run
    python bench/native.py jobs             # whole jobs against Hugging Face generate, alternating
    python bench/native.py attention        # ways to attend over the cache, one layer
    python bench/native.py invariant        # what batch_invariant costs

The floor of a decode step is the time of its matrix products alone, each measured at this number of rows in the same
run, plus reading the keys and values once at the measured copy bandwidth. Every ratio is of two numbers taken
alternately in one process; times are medians, and the spread (largest over smallest) stands beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from rollbook.modeling.config import ModelConfig, NewModelConfig
from rollbook.modeling.decoder import write_config
from rollbook.modeling.load import LoadedModel, load_model
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.engine import GenerateRequest
from rollbook.rollout.native.engine import NativeEngine
from rollbook.rollout.native.paged_attention import PageBatch, attend_pages
from rollbook.types import SamplingParams

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROMPT_TOKENS = 20


def tiny_llama(vocab_size: int) -> LoadedModel:
    """About 4 M parameters, on the built-in decoder: what a run with such a model uses."""
    new = NewModelConfig(
        alphabet="0123456789",
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_layers=5,
        num_heads=4,
        num_kv_heads=2,
        max_position=1024,
    )
    return load_model(ModelConfig(new=new))


def as_transformers(model: LoadedModel) -> PreTrainedModel:
    """The same weights in transformers' class, with its own attention."""
    config = LlamaConfig(**(write_config(model.module.config) | {"bos_token_id": None, "eos_token_id": None}))
    module = AutoModelForCausalLM.from_config(config).eval()
    module.load_state_dict(model.module.state_dict())
    return module.to(model.dtype)


def seconds(fn: Callable[[], object], repeats: int) -> float:
    """Median of `repeats` calls after two to warm up."""
    fn(), fn()
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        fn()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


# ---- the floor


def gemm_seconds(model: LoadedModel, num_rows: int) -> float:
    """Seconds of one forward's matrix products at `num_rows` rows, over distinct weights as the model has them."""
    weights = [m.weight for m in model.module.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {w.shape[1]: torch.randn(num_rows, w.shape[1], dtype=w.dtype) for w in weights}
    with torch.inference_mode():
        return seconds(lambda: [F.linear(inputs[w.shape[1]], w) for w in weights], 11)


def copy_bytes_per_s() -> float:
    source, target = torch.ones(1 << 26), torch.empty(1 << 26)  # 256 MiB each: beyond the caches
    return 2 * source.numel() * 4 / seconds(lambda: target.copy_(source), 5)


# ---- jobs


@dataclass(frozen=True)
class Job:
    name: str
    lengths: list[int]
    """New tokens of each sequence; sequence i belongs to prompt i // group_size."""
    group_size: int = 8

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def prompts(self, vocab_size: int) -> list[np.ndarray]:
        rng = np.random.default_rng(1)
        count = len(self.lengths) // self.group_size
        return [rng.integers(3, vocab_size, PROMPT_TOKENS).astype(np.int32) for _ in range(count)]


def jobs() -> list[Job]:
    rng = np.random.default_rng(0)
    tail = np.clip(rng.lognormal(np.log(64) - 0.5, 1.0, 256).astype(int), 1, 512)  # mean 64
    return [
        Job("equal 32 x 8 x 24 tokens", [24] * 256),
        Job("long tail 256, mean 64, max 512", tail.tolist()),
    ]


class _Lengths(StoppingCriteria):
    """Ends row i after lengths[i] new tokens, as an end-of-sequence token would."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        return input_ids.shape[1] - PROMPT_TOKENS >= self.lengths


def run_generate(model: PreTrainedModel, job: Job) -> None:
    """The job as one call of Hugging Face generate: every member's prompt is a row."""
    prompts = job.prompts(model.config.vocab_size)
    rows = torch.from_numpy(np.stack([p for p in prompts for _ in range(job.group_size)])).long()
    with torch.inference_mode():
        model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(job.lengths),
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([_Lengths(job.lengths)]),
        )


async def run_engine(engine: NativeEngine, vocab_size: int, job: Job) -> None:
    prompts = job.prompts(vocab_size)
    requests = [
        GenerateRequest(
            request_id=str(i),
            prompt_ids=prompts[i // job.group_size],
            sampling=SamplingParams(max_response_tokens=length, ignore_eos=True),
            seed=0,
            group_id=i // job.group_size,
            member_idx=i % job.group_size,
        )
        for i, length in enumerate(job.lengths)
    ]
    responses = await asyncio.gather(*(engine.generate(request) for request in requests))
    assert sum(len(r.response_ids) for r in responses) == job.num_tokens


async def started(model: LoadedModel, **settings: object) -> NativeEngine:
    values = {
        "num_slots": 256,
        "kv_pool_tokens": 256 * 544,
        "num_threads": torch.get_num_threads(),
        **settings,
    }
    engine = NativeEngine(model, RolloutConfig.model_validate(values), share_weights=True)
    await engine.start()
    return engine


async def bench_jobs(repeats: int, vocab_sizes: list[int], only: str) -> None:
    print(
        "\nuseful tokens/s, Hugging Face generate against the engine: wall seconds (max/min), CPU seconds beside them"
    )
    for vocab_size in vocab_sizes:
        model = tiny_llama(vocab_size)
        for dtype_name, dtype in DTYPES.items():
            model.module.to(dtype)
            baseline = as_transformers(model)
            engine = await started(model)
            for job in (job for job in jobs() if job.name.startswith(only)):
                wall_s: dict[str, list[float]] = {"generate": [], "engine": []}
                cpu_s: dict[str, list[float]] = {"generate": [], "engine": []}
                for repeat in range(repeats + (repeats > 1)):
                    for name in wall_s:
                        began, cpu_began = time.perf_counter(), time.process_time()
                        if name == "generate":
                            run_generate(baseline, job)
                        else:
                            await run_engine(engine, vocab_size, job)
                        if repeat or repeats == 1:  # the first of several rounds warms up
                            wall_s[name].append(time.perf_counter() - began)
                            cpu_s[name].append(time.process_time() - cpu_began)
                medians = {name: statistics.median(times) for name, times in wall_s.items()}
                cpu = {name: statistics.median(times) for name, times in cpu_s.items()}
                print(f"  {dtype_name} vocab {vocab_size:5d} {job.name:32s}", end="")
                for name, median_s in medians.items():
                    spread = max(wall_s[name]) / min(wall_s[name])
                    rate = job.num_tokens / median_s
                    print(
                        f"  {name} {median_s:6.2f} s (x{spread:.2f}) cpu {cpu[name]:6.2f} s {rate:6.0f} tok/s",
                        end="",
                    )
                print(
                    f"   ratio {medians['generate'] / medians['engine']:.2f}, of CPU time "
                    f"{cpu['generate'] / cpu['engine']:.2f}",
                    flush=True,
                )
            await engine.close()


async def bench_decode(repeats: int, vocab_sizes: list[int]) -> None:
    bandwidth = copy_bytes_per_s()
    print(f"\ncopy bandwidth {bandwidth / 1e9:.1f} GB/s (read + write)")
    print(
        "decode of equal lengths (20 prompt + 108 new tokens, a prompt each), against the floor of the same run"
    )
    for vocab_size in vocab_sizes:
        model = tiny_llama(vocab_size)
        num_params = sum(m.weight.numel() for m in model.module.modules() if isinstance(m, torch.nn.Linear))
        for dtype_name, dtype in DTYPES.items():
            model.module.to(dtype)
            for num_slots in (1, 16, 64, 256):
                engine = await started(model, num_slots=num_slots)
                job = Job("", [108] * num_slots, group_size=1)
                await run_engine(engine, vocab_size, job)
                steps_s, floors_s, gemms = [], [], []
                for _ in range(repeats):
                    before = await engine.stats()
                    await run_engine(engine, vocab_size, job)
                    after = await engine.stats()
                    steps_s.append(
                        (after.decode_s - before.decode_s) / (after.decode_steps - before.decode_steps)
                    )
                    gemm_s = gemm_seconds(model, num_slots)
                    kv_bytes = num_slots * (PROMPT_TOKENS + 54) * 2 * 5 * 128 * dtype.itemsize
                    gemms.append(2 * num_params * num_slots / gemm_s)
                    floors_s.append(gemm_s + kv_bytes / bandwidth)
                step_s, floor_s = statistics.median(steps_s), statistics.median(floors_s)
                print(
                    f"  {dtype_name} vocab {vocab_size:5d} slots {num_slots:4d}: {num_slots / step_s:8.0f} tok/s, step "
                    f"{step_s * 1e3:6.2f} ms (x{max(steps_s) / min(steps_s):.2f}), floor {floor_s * 1e3:6.2f} ms "
                    f"({statistics.median(gemms) / 1e9:4.0f} GFLOP/s), {floor_s / step_s:4.0%} of it"
                )
                await engine.close()


async def bench_invariant(repeats: int) -> None:
    print("\ncost of batch_invariant, fp32: wall seconds for the job (median), CPU seconds beside them")
    model = tiny_llama(64)
    for job in jobs():
        wall_s: dict[bool, list[float]] = {False: [], True: []}
        cpu_s: dict[bool, list[float]] = {False: [], True: []}
        engines = {flag: await started(model, batch_invariant=flag) for flag in wall_s}
        for _ in range(repeats):
            for flag, engine in engines.items():
                began, cpu_began = time.perf_counter(), time.process_time()
                await run_engine(engine, 64, job)
                wall_s[flag].append(time.perf_counter() - began)
                cpu_s[flag].append(time.process_time() - cpu_began)
        wall = {flag: statistics.median(times) for flag, times in wall_s.items()}
        cpu = {flag: statistics.median(times) for flag, times in cpu_s.items()}
        print(
            f"  {job.name:32s} off {wall[False]:6.2f} s cpu {cpu[False]:6.2f} s   on {wall[True]:6.2f} s cpu "
            f"{cpu[True]:6.2f} s   ratio {wall[True] / wall[False]:.2f}, of CPU time {cpu[True] / cpu[False]:.2f}",
            flush=True,
        )
        for engine in engines.values():
            await engine.close()


# ---- one layer's attention


def attention_case(
    lengths: list[int], page_tokens: int, dtype: torch.dtype
) -> dict[str, Callable[[], Tensor]]:
    """Ways to attend for one new token per sequence, over equal contents; 2 key heads, 2 queries each, width 64."""
    torch.manual_seed(0)
    num_rows, num_kv_heads, per_kv, dim = len(lengths), 2, 2, 64
    longest = max(lengths)
    queries = torch.randn(num_rows, num_kv_heads * per_kv, dim).to(dtype)
    keys, values = (torch.randn(num_rows, num_kv_heads, longest, dim).to(dtype) for _ in range(2))

    counts = np.array([-(-length // page_tokens) for length in lengths])
    num_pages = int(counts.sum())
    lists = np.random.default_rng(0).permutation(num_pages)
    list_starts = np.cumsum(counts) - counts
    owner, start = np.zeros(num_pages, np.int64), np.zeros(num_pages, np.int64)
    owner[lists] = np.repeat(np.arange(num_rows), counts)
    start[lists] = (np.arange(num_pages) - list_starts[owner[lists]]) * page_tokens
    pools = [torch.zeros(num_pages, num_kv_heads, page_tokens, dim, dtype=dtype) for _ in range(2)]
    for page in range(num_pages):
        first = int(start[page])
        for pool, states in zip(pools, (keys, values), strict=True):
            part = states[owner[page], :, first : min(first + page_tokens, longest)]
            pool[page, :, : part.shape[1]] = part
    position = torch.tensor(lengths) - 1
    ids = [torch.from_numpy(x) for x in (owner, start, lists, list_starts)]
    batch = PageBatch(num_rows, ids[0], ids[1], position, ids[2], ids[3])
    scale = dim**-0.5

    bias = torch.zeros(num_rows, 1, 1, longest, dtype=dtype)
    bias.masked_fill_((torch.arange(longest) > position[:, None])[:, None, None], -torch.inf)
    grouped = queries.view(num_rows, num_kv_heads, per_kv, dim)

    def pages() -> Tensor:
        return attend_pages(batch, queries, pools[0], pools[1], scale, 0, None, None)

    def rectangle() -> Tensor:
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias).flatten(1, 2)

    def flash_by_page() -> Tensor:
        mask = batch.mask(1, page_tokens, 0, dtype)[:, None]
        out, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            grouped[batch.owner], pools[0], pools[1], 0.0, False, attn_mask=mask, scale=scale
        )
        weight = weight.reshape(num_pages, -1)
        peak = torch.embedding_bag(weight, batch.lists, batch.list_starts, False, 2)[0]
        share = (weight - peak[batch.owner]).exp_()
        merged = (out.reshape(num_pages, -1, dim).float() * share[:, :, None]).flatten(1)
        total = torch.embedding_bag(share, batch.lists, batch.list_starts, False, 0)[0]
        merged = torch.embedding_bag(merged, batch.lists, batch.list_starts, False, 0)[0]
        return (merged.view(num_rows, -1, dim) / total[:, :, None]).to(dtype)

    def copy() -> Tensor:
        return pools[0].clone() + pools[1].clone().flatten()[0]

    ways = {"pages": pages, "rectangle": rectangle, "flash by page": flash_by_page}
    with torch.inference_mode():
        for way in ways.values():
            torch.testing.assert_close(
                way(), rectangle(), atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0
            )
    return ways | {"copy of K and V": copy}


def bench_attention(repeats: int) -> None:
    print("\none layer's attention, milliseconds (median)")
    rng = np.random.default_rng(0)
    for dtype_name, dtype in DTYPES.items():
        for num_rows in (1, 16, 64, 256):
            tail = np.clip(rng.lognormal(np.log(64) - 0.5, 1.0, num_rows).astype(int), 1, 512) + PROMPT_TOKENS
            for name, lengths in (
                ("64", [64] * num_rows),
                ("512", [512] * num_rows),
                ("tail", tail.tolist()),
            ):
                if num_rows * max(lengths) > 64 * 512 and name == "512":
                    continue
                print(f"  {dtype_name} {num_rows:4d} rows of {name:4s}:", end="")
                for page_tokens in (16, 32, 64):
                    ways = attention_case(lengths, page_tokens, dtype)
                    with torch.inference_mode():
                        taken = {way: 1e3 * seconds(fn, 3 * repeats) for way, fn in ways.items()}
                    shown = {
                        k: v for k, v in taken.items() if page_tokens == 32 or k in ("pages", "flash by page")
                    }
                    print(f"  P={page_tokens}", *(f"{way} {ms:.2f}" for way, ms in shown.items()), end="")
                print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=[], help="decode, jobs, attention, invariant")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vocab", type=int, nargs="*", default=[64, 4096])
    parser.add_argument("--job", default="", help="only jobs whose name begins so")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    parts = args.parts or ["decode", "jobs", "attention", "invariant"]
    print(f"torch {torch.__version__}, {args.threads} threads, {torch.backends.cpu.get_cpu_capability()}")
    if "decode" in parts:
        asyncio.run(bench_decode(args.repeats, args.vocab))
    if "jobs" in parts:
        asyncio.run(bench_jobs(args.repeats, args.vocab, args.job))
    if "attention" in parts:
        bench_attention(args.repeats)
    if "invariant" in parts:
        asyncio.run(bench_invariant(args.repeats))


if __name__ == "__main__":
    main()
