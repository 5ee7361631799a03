"""How fast the planner is, and how far its closed forms are from the event-by-event simulation.

python bench/planner.py            # about a minute on one core
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from rollbook.ledger.lengths import LengthDistribution
from rollbook.planner.options import PlanOptions
from rollbook.planner.plan import make_plan
from rollbook.planner.scenario import scenario_of
from rollbook.planner.search import Search
from rollbook.planner.sim_draws import lengths
from rollbook.planner.sim_scenario import DecodeTable, Scenario
from rollbook.planner.simulate import simulate


def cpu_s(call: Callable[[], object]) -> float:
    """Processor seconds of one call: a busy machine does not count."""
    started = time.process_time()
    call()
    return time.process_time() - started


def search_speed() -> None:
    print("search and whole plan, CPU seconds")
    for model, num_gpus in (
        ("Qwen3-8B", 64),
        ("Qwen3-32B", 128),
        ("DeepSeek-V3", 512),
        ("DeepSeek-V3", 4096),
    ):
        options = PlanOptions(
            model=model,
            num_gpus=num_gpus,
            prompts=max(512, num_gpus),
            response_tokens="8k",
            max_response_tokens="32k",
        )
        request = options.request()
        Search(request).run()  # imports and caches
        found: list[object] = []
        searched = cpu_s(lambda request=request, found=found: found.extend(Search(request).run()))  # type: ignore[misc]
        planned = cpu_s(lambda request=request: make_plan(request))  # type: ignore[misc]
        print(
            f"  {model:12} {num_gpus:5} GPUs  {len(found):4} topologies  search {searched:.2f}  plan {planned:.2f}"
        )


def simulation_speed() -> None:
    print("simulation of 512 GPUs, 8,192 sequences, 100 steps, CPU seconds a step")
    table = DecodeTable.of(lambda n, c: 0.02 + n * c * 2e-9, num_slots=128, context_tokens=4096)
    for mode, bound in (("sync", 0), ("colocate_async", 1), ("separate_async", 1), ("separate_async", 4)):
        scenario = Scenario(
            mode=mode,  # type: ignore[arg-type]
            num_replicas=512 if mode in ("sync", "colocate_async") else 320,
            slots_per_replica=128,
            decode=table,
            groups_per_step=512,
            group_size=16,
            prompt_tokens=1024.0,
            prefill_token_s=1e-5,
            response_tokens=lengths(LengthDistribution(32768, 8192, 0.7)),
            train_s=150.0,
            forward_s=40.0,
            sync_pause_s=3.0,
            max_staleness_steps=bound,
            num_steps=100,
        )
        taken = cpu_s(lambda scenario=scenario: simulate(scenario))  # type: ignore[misc]
        print(f"  {mode:15} bound {bound}  {taken / 100:.3f}")


def closed_forms() -> None:
    print("closed form over simulation - 1, both asynchronous modes")
    errors: list[float] = []
    cases = (
        ("Llama-3-8B", 64, 128, "8k", "32k", (24, 40)),
        ("Qwen3-32B", 128, 128, "8k", "32k", (32, 64)),
        ("DeepSeek-V3", 512, 128, "8k", "32k", (128, 256)),
        ("Qwen3-8B", 32, 64, "2k", "16k", (8, 16)),
        ("Qwen3-4B", 16, 256, "1k", "4k", (8,)),
    )
    for model, num_gpus, prompts, mean, longest, splits in cases:
        for bound in (1, 2, 4):
            request = PlanOptions(
                model=model,
                num_gpus=num_gpus,
                prompts=prompts,
                response_tokens=mean,
                max_response_tokens=longest,
                max_staleness=bound,
            ).request()
            search = Search(request)
            candidates = [search.candidate("colocate_async", num_gpus, num_gpus)]
            candidates += [search.candidate("separate_async", r, num_gpus - r) for r in splits]
            for candidate in candidates:
                error = candidate.step_s / simulate(scenario_of(request, candidate)).step_s - 1
                errors.append(error)
                print(f"  {model:12} {candidate.mode:15} {candidate.split!s:11} bound {bound}  {error:+.3f}")
    absolute = np.abs(errors)
    print(
        f"  {len(errors)} topologies: median {np.median(absolute):.3f}, 90th percentile "
        f"{np.quantile(absolute, 0.9):.3f}, worst {absolute.max():.3f}"
    )


if __name__ == "__main__":
    search_speed()
    simulation_speed()
    closed_forms()
