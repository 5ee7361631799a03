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
