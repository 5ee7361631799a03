"""Laws of a whole search: more devices never cost time, for whatever topology, layout and numbers it chooses."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rollbook.planner.options import PlanOptions
from rollbook.planner.search import Search

CASES = [
    ("Qwen3-8B", "H100", (8, 128, 4096)),
    ("Qwen3-30B-A3B", "H100", (16, 512)),
    ("Qwen3.5-35B-A3B", "B200", (8, 512)),
    ("Qwen3-32B", "H20", (32, 2048)),
    ("DeepSeek-V3", "H100", (512, 4096)),
]


@pytest.mark.parametrize(("model", "gpu", "sizes"), CASES)
def test_the_best_step_never_gets_longer_with_more_gpus(model: str, gpu: str, sizes: tuple[int, ...]) -> None:
    fastest = []
    for num_gpus in sizes:
        options = PlanOptions(
            model=model, gpu=gpu, num_gpus=str(num_gpus), response_tokens="4k", max_response_tokens="16k"
        )
        fastest.append(min(c.step_s for c in Search(options.request(), is_brief=True).run() if c.fits))
    assert all(more < fewer for fewer, more in pairwise(fastest))


def test_a_publication_between_shared_gpus_does_not_decide_the_step_of_a_large_cluster() -> None:
    """A gather is a tree: from 256 to 4,096 GPUs four hops more, not eight times the time a tensor."""
    seconds = []
    for num_gpus in (256, 4096):
        search = Search(PlanOptions(model="Qwen3-32B", num_gpus=str(num_gpus), prompts="1024").request())
        found = search.candidate("sync", num_gpus, num_gpus).account.seconds
        seconds.append(found.sync)
        assert found.sync < 0.1 * found.total
    assert seconds[1] < 2 * seconds[0]


WORKLOADS = [
    {"model": "Qwen3-8B", "num_gpus": "32", "prompts": "64", "max_response_tokens": "32k"},
    {"model": "Qwen3-32B", "num_gpus": "64", "response_tokens": "8k", "max_response_tokens": "32k"},
    {"model": "Qwen3-30B-A3B", "num_gpus": "32", "prompts": "256", "response_tokens": "2k"},
    {"model": "Qwen3-14B", "gpu": "H20", "num_gpus": "16", "prompts": "32", "algorithm": "ppo"},
    {"model": "Qwen3-0.6B", "num_gpus": "8", "prompts": "64", "response_tokens": "1k"},
    # Separated, the trainer leaves room for one engine of eight GPUs and for none of the larger, faster ones.
    {"model": "Qwen3-235B-A22B", "gpu": "H20", "num_gpus": "64"},
]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_engine_layout_that_is_asked_for_beats_the_search(workload: dict[str, str]) -> None:
    """Of each mode: what engines cost beside generation, and the staleness bound, are part of the choice."""

    def fastest(rollout_tp: int) -> dict[str, float]:
        found = Search(PlanOptions(**workload, rollout_tp=rollout_tp).request()).run()  # type: ignore[arg-type]
        steps: dict[str, float] = {}
        for candidate in found:
            if candidate.fits:
                steps[candidate.mode] = min(candidate.step_s, steps.get(candidate.mode, candidate.step_s))
        return steps

    chosen = fastest(0)
    for rollout_tp in (1, 2, 4, 8):
        for mode, step_s in fastest(rollout_tp).items():
            assert chosen[mode] <= 1.01 * step_s, (mode, rollout_tp)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_wider_staleness_bound_never_lengthens_a_step(workload: dict[str, str]) -> None:
    steps: list[dict[tuple[str, int], float]] = []
    for bound in (1, 2, 3, 6, 12):
        search = Search(PlanOptions(**workload, max_staleness=bound).request())  # type: ignore[arg-type]
        gpus = search.request.cluster.num_gpus
        found = [search.candidate("colocate_async", gpus, gpus)]
        found += [
            search.candidate("separate_async", part, gpus - part) for part in (gpus // 4, gpus // 2)
        ]  # fmt: skip
        steps.append({(c.mode, c.split[0]): c.step_s for c in found})
    for narrow, wide in pairwise(steps):
        assert all(wide[key] <= 1.001 * narrow[key] for key in narrow)
