"""Laws of a whole search: more devices never cost time, for whatever topology, layout and numbers it chooses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from rollbook.ledger.account import StepAccount
from rollbook.ledger.layout import ReplicaLayout
from rollbook.ledger.step import is_colocated, rollout_side
from rollbook.ledger.workload import Mode
from rollbook.planner import search as search_module
from rollbook.planner import sides as sides_module
from rollbook.planner.candidate import ON_POLICY, Candidate
from rollbook.planner.choice import best_of, choose
from rollbook.planner.floors import floor_step_s
from rollbook.planner.offload import Offload, offloads_of
from rollbook.planner.options import PlanOptions
from rollbook.planner.plan import make_plan
from rollbook.planner.request import PlanRequest
from rollbook.planner.search import SAME_FRAC, Search
from rollbook.planner.sides import TrainSides
from rollbook.planner.staleness import within_bound

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


RACES: list[dict[str, object]] = [
    {"model": "Qwen3-8B"},
    {"model": "Qwen3-32B", "num_gpus": "2048", "prompts": "4096"},
    {"model": "Llama-3-8B", "num_gpus": "1024"},
    {"model": "DeepSeek-V3", "num_gpus": "256", "response_tokens": "8k", "max_response_tokens": "32k"},
    {"model": "Qwen3-30B-A3B", "num_gpus": "32", "max_staleness": 3, "length_sigma": 1.0},
    {"model": "Qwen3-8B", "num_gpus": "32", "max_staleness": 2, "lend": 5.0},
    {"model": "Qwen3-8B", "num_gpus": "16", "max_staleness": 0},
    {"model": "Qwen3-14B", "num_gpus": "2", "prompts": "32"},  # on hosts alone, or not at all
    {"model": "Qwen3-Next-80B-A3B", "num_gpus": "16", "reward": "generative", "reward_model": "Qwen3-8B"},
    {"model": "Qwen3-8B", "num_gpus": "32", "turns": 6, "env_seconds": 10, "env_p99_seconds": 60},
    {
        "model": "Qwen3-8B",
        "num_gpus": "16",
        "turns": 20,
        "env_seconds": 15,
        "prompts": "64",
        "keep_prefix": False,
    },
]


def _followed_all(search: Search) -> list[Candidate]:
    """What `search` finds where nothing is left out because something else is faster."""
    found = [search.candidate(*topology) for topology in search.topologies()]
    places = offloads_of(search.request)[1:]
    found += [search.candidate(*t, place) for place in places for t in search.topologies()]
    return sorted((c for c in found if c.fits), key=lambda c: c.step_s)


def _key(found: Candidate | None) -> tuple[object, ...] | None:
    return None if found is None else (found.mode, found.split, found.train.offload, found.step_s)


@pytest.mark.parametrize("workload", RACES)
def test_what_is_not_followed_is_not_what_would_be_chosen(workload: dict[str, object]) -> None:
    request = PlanOptions(**workload).request()  # type: ignore[arg-type]
    search = Search(request, is_brief=True)
    chosen, _ = choose(request, _followed_all(search))
    assert _key(best_of(Search(request, layouts=search.layouts, is_brief=True))) == _key(chosen)


@pytest.mark.parametrize("workload", RACES)
def test_no_step_is_below_its_floor(workload: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    request = PlanOptions(**workload).request()  # type: ignore[arg-type]
    followed: list[tuple[float, float]] = []

    def compared(request: PlanRequest, account: StepAccount, layout: ReplicaLayout) -> StepAccount:
        found = within_bound(request, account, layout)
        followed.append((floor_step_s(request, account, layout), found.seconds.total))
        return found

    monkeypatch.setattr("rollbook.planner.search.within_bound", compared)
    search = Search(request, is_brief=True)
    for layout in search.layouts:
        one = Search(request, layouts=[layout], is_brief=True)
        for place in offloads_of(request)[:2]:
            for topology in search.topologies():
                one.candidate(*topology, place)
    assert followed and all(floor <= step * (1 + 1e-9) for floor, step in followed)


AGENTS: list[dict[str, object]] = [race for race in RACES if "turns" in race]


@pytest.mark.parametrize(
    "workload", [*AGENTS, {**AGENTS[0], "env_p99_seconds": 0}, {**AGENTS[0], "prompts": "8"}]
)
def test_no_on_policy_step_of_agents_is_below_its_floor(workload: dict[str, object]) -> None:
    """Nor far above it where nothing but the slowest agent is waited for: else the floor spares nothing."""
    request = PlanOptions(**workload).request()  # type: ignore[arg-type]
    search = Search(request, is_brief=True)
    ratios = []
    for mode, rollout, train in (t for t in search.topologies() if t[0] in ON_POLICY):
        for layout in search.layouts:
            side, trainer = search.engines.of(rollout, mode, layout), search.trainers.best(train)
            alone = search._joined(mode, side, layout, trainer)
            followed = search._joined(mode, search.engines.followed(side, mode, layout), layout, trainer)
            ratios.append(floor_step_s(request, alone.account, layout) / followed.step_s)
    assert max(ratios) <= 1 + 1e-9
    assert max(ratios) > 0.8


@pytest.mark.parametrize("workload", RACES)
def test_a_slower_trainer_behind_the_same_engines_never_shortens_a_step(workload: dict[str, object]) -> None:
    """By which a brief search spares what it need not follow."""
    request = PlanOptions(**workload).request()  # type: ignore[arg-type]
    search = Search(request, is_brief=True)
    gpus = request.cluster.num_gpus
    modes: list[tuple[Mode, int, int]] = [
        ("colocate_async", gpus, gpus),
        ("separate_async", gpus // 2, gpus - gpus // 2),
    ]
    for mode, rollout, train in modes:
        layout = search.layouts[0]
        side, trainer = search.engines.of(rollout, mode, layout), search.trainers.best(train)
        steps = []
        for factor in (1.0, 1.02, 1.3, 3.0):
            slower = replace(
                trainer,
                side=replace(
                    trainer.side,
                    train_s=factor * trainer.side.train_s,
                    forward_s=factor * trainer.side.forward_s,
                ),
            )
            account = search._joined(mode, side, layout, slower).account
            steps.append(within_bound(request, account, layout).seconds.total)
        assert all(longer >= (1 - SAME_FRAC) * step for step, longer in pairwise(steps))


@pytest.mark.parametrize(("workload", "most_frac"), [({"model": "Qwen3-8B"}, 0.08), (AGENTS[0], 0.13)])
def test_few_of_the_topologies_are_followed(
    workload: dict[str, object], most_frac: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a plan with its sizes and what-ifs."""
    joined, followed = Counter[str](), Counter[str]()
    for name, count in (("join_sides", joined), ("within_bound", followed)):
        real = getattr(search_module, name)

        def counting(*args: object, _of: object = real, _in: Counter[str] = count, **more: object) -> object:
            _in["calls"] += 1
            return _of(*args, **more)  # type: ignore[operator]

        monkeypatch.setattr(search_module, name, counting)
    make_plan(PlanOptions(**workload).request())  # type: ignore[arg-type]
    assert 0 < followed["calls"] < most_frac * joined["calls"]


def test_a_side_is_computed_once_for_all_sizes_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and trainers know their own GPUs alone: twelve GPUs that train do so in a cluster of 16 and of 32."""
    engines, trainers = Counter[object](), Counter[tuple[str, int, Offload]]()
    real_engines, real_trainers = rollout_side, TrainSides._best_trainer

    def engine_side(*args: Any, **more: Any) -> object:
        what = (
            str(args[1]),
            str(args[3].stacks),
            more["num_gpus"],
            is_colocated(more["mode"]),
            more["layouts"],
            more.get("held_bytes"),
        )
        engines[(*what, more["follows_environments"])] += 1
        return real_engines(*args, **more)

    def trainer_side(self: TrainSides, num_gpus: int, offload: Offload) -> object:
        cluster = replace(self._request.cluster, num_gpus=1)
        asked = replace(self._request, cluster=cluster, split=None, offload="auto")
        trainers[str(asked), num_gpus, offload] += 1
        return real_trainers(self, num_gpus, offload)

    monkeypatch.setattr(sides_module, "rollout_side", engine_side)
    monkeypatch.setattr(TrainSides, "_best_trainer", trainer_side)
    make_plan(PlanOptions(model="Qwen3-8B", num_gpus=32, prompts=64).request())
    # The sentence on engine families prices the first one again.
    assert len(engines) > 50 and sum(number > 1 for number in engines.values()) <= 1
    # In a cluster of one GPU only the plainest trainer is asked about: a question of its own.
    again = {num_gpus for (_, num_gpus, _), number in trainers.items() if number > 1}
    assert len(trainers) > 20 and again <= {1}


def test_what_does_not_fit_is_told_with_what_the_bound_adds() -> None:
    """Else the step of a topology that lacks memory looks a third shorter than it would be with it."""
    request = PlanOptions(
        model="DeepSeek-V3",
        num_gpus=512,
        prompts=128,
        response_tokens="8k",
        max_response_tokens="32k",
        max_staleness=2,
    ).request()
    found = Search(request).candidate("separate_async", 64, 448)
    assert found.why_not and found.account.bound_s > 0.3 * found.step_s
