"""How fast the planner is, and how far its closed forms are from the event-by-event simulation.

python bench/planner.py            # some minutes on one core
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

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


COMMANDS = {
    "8B, 64 GPUs": "--model Qwen3-8B --num-gpus 64",
    "32B, 128 GPUs": "--model Qwen3-32B --num-gpus 128 --response-tokens 8k --max-response-tokens 32k",
    "DeepSeek-V3, 4,096 GPUs": "--model DeepSeek-V3 --num-gpus 4096 --prompts 4k --response-tokens 8k "
    "--max-response-tokens 32k",
    "agents, 32 GPUs": "--model Qwen3-8B --num-gpus 32 --prompts 128 --turns 10 --env-seconds 10 "
    "--env-p99-seconds 60 --observation-tokens 512",
    "agents of 20 turns, 32 GPUs": "--model Qwen3-8B --num-gpus 32 --prompts 128 --group-size 8 --turns 20 "
    "--env-seconds 15 --env-p99-seconds 120 --observation-tokens 1k --response-tokens 6k --max-response-tokens 16k",
}


def command_speed() -> None:
    """From the shell's call to its last line: the interpreter, imports, search, sizes, what-ifs and printing."""
    print("rollbook plan, the whole command, CPU seconds, the least of three")
    for name, options in COMMANDS.items():
        least = min(child_cpu_s("-m", "rollbook.cli.main", "plan", *options.split()) for _ in range(3))
        print(f"  {name:28} {least:.2f}")
    print(f"  {'of it: the empty command':28} {min(child_cpu_s('-c', '') for _ in range(3)):.2f}")
    imports = "import typer, typer._adapters, rollbook.cli.plan, rollbook.planner.plan, rollbook.planner.show"
    print(f"  {'and imports':28} {min(child_cpu_s('-c', imports) for _ in range(3)):.2f}")


def child_cpu_s(*arguments: str) -> float:
    """Processor seconds of a Python process of its own."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


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
    """Some splits, and the one at which both sides take equally long: the search goes there."""
    print("closed form over simulation - 1, both asynchronous modes")
    errors: list[float] = []
    cases = (
        ("Llama-3-8B", 64, 128, "8k", "32k", (24, 40)),
        ("Qwen3-32B", 128, 128, "8k", "32k", (32, 64)),
        ("DeepSeek-V3", 512, 128, "8k", "32k", (128, 256)),
        ("Qwen3-8B", 32, 64, "2k", "16k", (8, 16)),
        ("Qwen3-4B", 16, 256, "1k", "4k", (8,)),
        ("Qwen3-32B", 64, 512, "8k", "32k", (32,)),
    )
    for model, num_gpus, prompts, mean, longest, splits in cases:
        for bound in (1, 2, 4) if prompts < 512 else (1,):
            options = {
                "model": model, "num_gpus": num_gpus, "prompts": prompts, "response_tokens": mean,
                "max_response_tokens": longest, "max_staleness": bound,
            }  # fmt: skip
            errors += _apart(options, splits)
    _summary(errors)
    print("the same of agents, split in halves")
    errors = []
    for turns, env_s, p99_s in ((4, 2.0, 0.0), (10, 2.0, 20.0), (10, 20.0, 0.0), (30, 10.0, 60.0)):
        for keeps in (True, False):
            options = {
                "model": "Qwen3-8B", "num_gpus": 32, "prompts": 64, "response_tokens": "4k",
                "max_response_tokens": "16k", "turns": turns, "env_seconds": env_s, "env_p99_seconds": p99_s,
                "observation_tokens": "256", "keep_prefix": keeps,
            }  # fmt: skip
            errors += _apart(options, (16,), f"{turns} turns, {env_s:g} s, {'kept' if keeps else 'lost'}")
    _summary(errors)


def _apart(options: dict[str, Any], splits: tuple[int, ...], what: str = "") -> list[float]:
    request = PlanOptions(**options).request()
    search, num_gpus = Search(request), request.cluster.num_gpus
    asked = [("colocate_async", num_gpus, num_gpus)]
    meets = search.time_optimal_rollout_gpus()
    asked += [
        ("separate_async", count, num_gpus - count) for count in dict.fromkeys((*splits, meets)) if count
    ]
    errors = []
    for mode, rollout, train in asked:
        candidate = search.candidate(mode, rollout, train)  # type: ignore[arg-type]
        errors.append(candidate.step_s / simulate(scenario_of(request, candidate)).step_s - 1)
        label = what or f"bound {request.max_staleness_steps}"
        print(f"  {options['model']:12} {mode:15} {candidate.split!s:11} {label}  {errors[-1]:+.3f}")
    return errors


def _summary(errors: list[float]) -> None:
    absolute = np.abs(errors)
    print(
        f"  {len(errors)} topologies: median {np.median(absolute):.3f}, 90th percentile "
        f"{np.quantile(absolute, 0.9):.3f}, worst {absolute.max():.3f}"
    )


if __name__ == "__main__":
    command_speed()
    search_speed()
    simulation_speed()
    closed_forms()
