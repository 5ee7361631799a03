"""One update of a 4M-parameter policy beside the time of its matrix products alone.

    python bench/trainer.py                              # both length mixes, both dtypes, shared prompts and not
    python bench/trainer.py --threads 1 --clock cpu      # on a busy machine: seconds of this thread, not of the wall

The floor is 6N FLOPs for every token of the batch (and the output layer for response tokens only), at the rate of
the products of exactly these shapes, measured between the updates of the same run. With shared prompts fewer tokens
are computed than the batch has, so an update can beat the floor.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from rollbook.modeling.config import ModelConfig, NewModelConfig
from rollbook.modeling.load import DTYPES
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.objective import SupervisedObjective
from rollbook.trainer.trainer import Trainer
from rollbook.types import TrainSequence

VOCAB_SIZE, HIDDEN, FFN, LAYERS, HEADS = 4096, 256, 688, 4, 4
NUM_GROUPS, GROUP_SIZE, PROMPT_TOKENS = 32, 8, 16


def response_lengths(kind: str) -> list[int]:
    """24 tokens each, or log-normal with mean 64 and at most 512."""
    draw = random.Random(1)
    count = NUM_GROUPS * GROUP_SIZE
    if kind == "short":
        return [24] * count
    return [min(512, max(4, int(draw.lognormvariate(math.log(64) - 0.32, 0.8)))) for _ in range(count)]


def sequences(kind: str) -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    out = []
    for i, length in enumerate(response_lengths(kind)):
        if i % GROUP_SIZE == 0:
            prompt = rng.integers(0, VOCAB_SIZE, PROMPT_TOKENS)
        ids = np.concatenate([prompt, rng.integers(0, VOCAB_SIZE, length)]).astype(np.int32)
        mask = np.arange(len(ids)) >= PROMPT_TOKENS
        zeros = np.zeros(len(ids), np.float32)
        out.append(
            TrainSequence(
                group_id=i // GROUP_SIZE,
                member_idx=i % GROUP_SIZE,
                source="bench",
                token_ids=ids,
                action_mask=mask,
                loss_mask=mask,
                behavior_logprobs=zeros,
                reward=0.0,
                oldest_version=0,
                advantages=zeros,
            )
        )
    return out


def floor_s(num_tokens: int, num_loss_tokens: int, dtype: torch.dtype, clock: Callable[[], float]) -> float:
    """Forward and both backward products of every layer over `num_tokens`, in pieces of 2048 rows."""
    total = 0.0
    layer = [(HIDDEN, HIDDEN)] * 4 + [(HIDDEN, FFN)] * 2 + [(FFN, HIDDEN)]
    work = [(shape, 2048, LAYERS * num_tokens / 2048) for shape in layer]
    work.append(((HIDDEN, VOCAB_SIZE), 1024, num_loss_tokens / 1024))
    for (width, height), rows, times in work:
        x, w, g = (torch.randn(shape).to(dtype) for shape in ((rows, width), (height, width), (rows, height)))
        seconds = []
        for _ in range(6):
            start = clock()
            x @ w.t(), g @ w, g.t() @ x
            seconds.append(clock() - start)
        total += statistics.median(seconds[1:]) * times
    return total


def measure(kind: str, dtype: str, share_prompts: bool, rounds: int, clock: Callable[[], float]) -> str:
    new = NewModelConfig(
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        intermediate_size=FFN,
        tie_embeddings=False,
        vocab_size=VOCAB_SIZE,
        max_position=1024,
    )
    config = TrainerConfig(lr=1e-4, share_prompts=share_prompts)
    model_config = ModelConfig.model_validate({"new": new, "dtype": dtype})
    trainer = Trainer(config, model_config, max_response_tokens=512)
    batch = trainer.make_batch(sequences(kind), step=0, weight_version=0)
    updates, floors = [], []
    for i in range(rounds + 1):
        start = clock()
        values = trainer.update(batch, SupervisedObjective())
        if i:
            updates.append(clock() - start)
            floors.append(floor_s(batch.num_tokens, batch.num_loss_tokens, DTYPES[dtype], clock))
    computed = int(values["trainer/actor_tokens"].result())
    update, floor = statistics.median(updates), statistics.median(floors)
    return (
        f"{kind:6} {dtype:9} {'shared' if share_prompts else 'plain':7} {batch.num_tokens:7} {computed:9} "
        f"{update:9.3f} {max(updates) / min(updates):7.2f} {floor:9.3f} {floor / update:9.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.perf_counter if arguments.clock == "wall" else time.thread_time
    print(
        "mix    dtype     prompts  tokens  computed  update s  spread   floor s   floor / update", flush=True
    )
    for kind in ("short", "long"):
        for dtype in ("bfloat16", "float32"):
            for share_prompts in (True, False):
                print(measure(kind, dtype, share_prompts, arguments.rounds, clock), flush=True)


if __name__ == "__main__":
    main()
