"""Decode steps of the native engine on one GPU: eager against recorded CUDA graphs.

    PYTHONPATH=src python bench/gpu/decode.py               # a model of Qwen2.5-0.5B's size, random weights; a minute
    PYTHONPATH=src python bench/gpu/decode.py --tiny        # the same on a CPU, which records nothing

Each round samples `--tokens` tokens from as many prompts as there are slots. Graphs are recorded when a size comes for
the second time, so the first two rounds pay for them and are shown apart.

Expectations, written before the first run (H200, bfloat16, 24 layers):
- eager: 26 ms a step whatever the slots: about a thousand launches and their Python.
- graphs: about 900 kernels of 3 to 4 us, sampling and planning outside the graph: 4 to 7 ms a step with 16 and 64
  slots, 6 to 10 ms with 256. At least 3 times the tokens/s of eager with 16 and 64 slots, 2.5 times with 256.
- a recording costs as much as three eager steps, and a round meets fewer than 30 sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass

import numpy as np
import torch

from rollbook.modeling.config import ModelConfig, NewModelConfig
from rollbook.modeling.load import LoadedModel, load_model
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.engine import GenerateRequest
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


def make_model(*, is_tiny: bool) -> LoadedModel:
    new = NewModelConfig(
        architecture="qwen2",
        hidden_size=64 if is_tiny else 896,
        num_layers=2 if is_tiny else 24,
        num_heads=4 if is_tiny else 14,
        num_kv_heads=2,
        intermediate_size=96 if is_tiny else 4864,
        max_position=4096,
        vocab_size=500 if is_tiny else 151_936,
    )
    dtype, device = ("float32", "cpu") if is_tiny else ("bfloat16", "cuda")
    return load_model(ModelConfig(new=new, dtype=dtype, device=device))


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
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--tokens", type=int, default=128, help="sampled from each prompt")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = make_model(is_tiny=options.tiny)
    model.module.requires_grad_(False)
    print(f"{'slots':>6} {'':7} {'tokens/s by round':40} {'ms a step by round':32} {'recorded by round'}")
    for num_slots in options.slots:
        best = {}
        for cuda_graphs in (False, True):
            rounds = asyncio.run(measure(model, num_slots, options.tokens, cuda_graphs=cuda_graphs))
            name = "graphs" if cuda_graphs else "eager"
            best[name] = rounds[-1].tokens_per_s
            rates = "  ".join(f"{one.tokens_per_s:8,.0f}" for one in rounds)
            steps = "  ".join(f"{one.step_ms:6.2f}" for one in rounds)
            recorded = "  ".join(str(one.num_recorded) for one in rounds)
            print(f"{num_slots:6} {name:7} {rates:40} {steps:32} {recorded}", flush=True)
        print(f"{num_slots:6} graphs / eager, last rounds: {best['graphs'] / best['eager']:.2f}", flush=True)


if __name__ == "__main__":
    main()
