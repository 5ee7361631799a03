"""Decode steps of the native engine on one GPU: eager against recorded CUDA graphs, and attention over pages by torch's
operations against one Triton kernel.

    PYTHONPATH=src python bench/gpu/decode.py               # a model of Qwen2.5-0.5B's size, random weights; a minute
    PYTHONPATH=src python bench/gpu/decode.py --shape 4b --slots 16 256 --tokens 512
    PYTHONPATH=src python bench/gpu/decode.py --shape tiny  # the same on a CPU, which records nothing

Each round samples `--tokens` tokens from as many prompts as there are slots. Graphs are recorded when a size comes for
the second time, so the first two rounds pay for them and are shown apart.

Expectations, written before the first run (H200, bfloat16, 24 layers):
- eager: 26 ms a step whatever the slots: about a thousand launches and their Python.
- graphs: about 900 kernels of 3 to 4 us, sampling and planning outside the graph: 4 to 7 ms a step with 16 and 64
  slots, 6 to 10 ms with 256. At least 3 times the tokens/s of eager with 16 and 64 slots, 2.5 times with 256.
- a recording costs as much as three eager steps, and a round meets fewer than 30 sizes.

Written before the first run with the kernel (`--shape 4b`, Qwen3-4B's; with torch's operations a step of 256 rows with
270 tokens each took 27 ms in a run of `grpo_qwen3_4b.toml`): weights 2.2 ms, keys and values 2.5 to 4, products of 256
rows 4 to 5, launches of 36 layers 2 to 3: 11 to 14 ms, half of before. With 16 rows 6 to 8 ms. `0.5b`, 256 rows:
6.5 to 8 ms instead of 8.4.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch

from rollbook import kernels
from rollbook.modeling.config import ModelConfig, NewModelConfig
from rollbook.modeling.load import LoadedModel, load_model
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.engine import GenerateRequest
from rollbook.rollout.native import paged_attention
from rollbook.rollout.native.engine import NativeEngine
from rollbook.types import SamplingParams

PROMPT_TOKENS = 32
NUM_ROUNDS = 4


@dataclass(frozen=True)
class Round:
    """What one round took."""

    tokens_per_s: float
    step_ms: float
    num_recorded: int
    """Graphs recorded so far."""


SHAPES = {
    "tiny": NewModelConfig(
        architecture="qwen2",
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=96,
        max_position=4096,
        vocab_size=500,
    ),
    "0.5b": NewModelConfig(
        architecture="qwen2",
        hidden_size=896,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        intermediate_size=4864,
        max_position=4096,
        vocab_size=151_936,
    ),
    "4b": NewModelConfig(
        architecture="qwen3",
        hidden_size=2560,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=9728,
        max_position=4096,
        vocab_size=151_936,
    ),
}
WAYS = {
    "eager": (False, True),
    "torch": (True, False),
    "graphs": (True, True),
}
"""Records graphs; attends by the kernel."""


def make_model(shape: str) -> LoadedModel:
    dtype, device = ("float32", "cpu") if shape == "tiny" else ("bfloat16", "cuda")
    return load_model(ModelConfig(new=SHAPES[shape], dtype=dtype, device=device))


async def run_round(
    engine: NativeEngine, vocab_size: int, num_slots: int, num_tokens: int, tag: int
) -> Round:
    prompts = np.random.default_rng(tag).integers(0, vocab_size, (num_slots, PROMPT_TOKENS)).astype(np.int32)
    sampling = SamplingParams(max_response_tokens=num_tokens, ignore_eos=True)
    before, began_at_s = await engine.stats(), time.perf_counter()
    await asyncio.gather(
        *(
            engine.generate(
                GenerateRequest(
                    request_id=f"{tag}/{row}",
                    prompt_ids=prompt,
                    sampling=sampling,
                    seed=tag,
                    group_id=row,
                    member_idx=0,
                )
            )
            for row, prompt in enumerate(prompts)
        )
    )
    elapsed_s, after = time.perf_counter() - began_at_s, await engine.stats()
    graphs = engine._runner.graphs if engine._runner is not None else None
    return Round(
        num_slots * num_tokens / elapsed_s,
        1e3 * (after.decode_s - before.decode_s) / (after.decode_steps - before.decode_steps),
        0 if graphs is None else graphs.num_recorded,
    )


async def measure(model: LoadedModel, num_slots: int, num_tokens: int, *, cuda_graphs: bool) -> list[Round]:
    config = RolloutConfig(
        num_slots=num_slots,
        kv_pool_tokens=num_slots * (PROMPT_TOKENS + num_tokens + 32),
        device=str(model.device.type),
        cuda_graphs=cuda_graphs,
    )
    engine = NativeEngine(model, config, share_weights=True)
    await engine.start()
    try:
        rounds = NUM_ROUNDS if cuda_graphs else 2
        vocab_size = model.facts.vocab_size
        return [await run_round(engine, vocab_size, num_slots, num_tokens, tag) for tag in range(rounds)]
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.5b", help="of the model; tiny: for a CPU")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--tokens", type=int, default=128, help="sampled from each prompt")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = make_model(options.shape)
    model.module.requires_grad_(False)
    print(f"{'slots':>6} {'':7} {'tokens/s by round':40} {'ms a step by round':32} {'recorded by round'}")
    for num_slots in options.slots:
        best = {}
        for name in options.ways:
            cuda_graphs, has_kernel = WAYS[name]
            with mock.patch.object(
                paged_attention, "runs_triton", kernels.runs_triton if has_kernel else lambda _: False
            ):
                rounds = asyncio.run(measure(model, num_slots, options.tokens, cuda_graphs=cuda_graphs))
            best[name] = rounds[-1].tokens_per_s
            rates = "  ".join(f"{one.tokens_per_s:8,.0f}" for one in rounds)
            steps = "  ".join(f"{one.step_ms:6.2f}" for one in rounds)
            recorded = "  ".join(str(one.num_recorded) for one in rounds)
            print(f"{num_slots:6} {name:7} {rates:40} {steps:32} {recorded}", flush=True)
        for name in options.ways[:-1]:
            ratio = best[options.ways[-1]] / best[name]
            print(f"{num_slots:6} {options.ways[-1]} / {name}, last rounds: {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
