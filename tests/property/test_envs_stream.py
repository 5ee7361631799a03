"""The prompt stream: every prompt once an epoch, whatever is interrupted. BR-052, BR-053."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.envs.stream import Pool, PromptStream
from rollbook.errors import CheckpointError, DataError
from rollbook.types import Prompt


def prompts(n: int, source: str = "s") -> list[Prompt]:
    return [
        Prompt(prompt_id=f"{source}/{i}", prompt_ids=np.array([i + 1], np.int32), source=source)
        for i in range(n)
    ]


def stream(n: int, *, num_epochs: int = 0, seed: int = 0, shuffle: bool = True) -> PromptStream:
    return PromptStream([Pool(prompts(n))], seed=seed, num_epochs=num_epochs, shuffle=shuffle)


def through_json(state: object) -> dict[str, object]:
    loaded: dict[str, object] = json.loads(json.dumps(state))
    return loaded


def ids(taken: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in taken]


def test_an_epoch_holds_every_prompt_once_in_an_order_of_its_own() -> None:
    one = stream(50, num_epochs=2)
    first, second = ids(one.take(50)), ids(one.take(50))
    assert sorted(first) == sorted(second) == sorted(ids(prompts(50)))
    assert first != second
    assert one.take(5) == []
    assert ids(stream(50).take(50)) == first
    assert ids(stream(50, seed=1).take(50)) != first
    assert ids(stream(5, shuffle=False).take(7)) == ["s/0", "s/1", "s/2", "s/3", "s/4", "s/0", "s/1"]


@pytest.mark.parametrize("saved_at", range(1, 9))
def test_br052_resuming_at_any_step_gives_the_unbroken_order(saved_at: int) -> None:
    """8 prompts, batches of 2, 2 epochs: 8 steps; also at the exact end of an epoch, and at the end of all."""
    unbroken = ids(stream(8, num_epochs=2).take(16))
    running = stream(8, num_epochs=2)
    seen: list[str] = []
    for step in range(1, 9):
        batch = running.take(2)
        seen += ids(batch)
        for prompt in batch:
            running.acknowledge(prompt)
        if step == saved_at:
            state = through_json(running.state())
            running = stream(8, num_epochs=2)
            running.restore(state)  # type: ignore[arg-type]
            assert running.is_consumed == (saved_at == 8)
    assert seen == unbroken
    assert running.is_consumed
    assert running.take_one() is None


@given(st.integers(0, 2**32), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_br053_kills_at_random_moments_lose_and_repeat_nothing(seed: int, num_epochs: int) -> None:
    """40 prompts, 6 in flight, one in five slow, steps of 3; killed at random, resumed until done. What was in
    flight or finished and untrained at a kill was never acknowledged, so it is asked again."""
    chance = np.random.default_rng(seed)
    running, trained, state = (
        stream(40, num_epochs=num_epochs),
        Counter[str](),
        stream(40, num_epochs=num_epochs).state(),
    )
    in_flight: list[Prompt] = []
    finished: list[Prompt] = []
    num_kills = 0
    while True:
        while len(in_flight) < 6 and (prompt := running.take_one()) is not None:
            in_flight.append(prompt)
        if not in_flight and not finished:
            break
        quick = [p for p in in_flight if int(p.prompt_id[2:]) % 5 or chance.random() < 0.1]
        for prompt in quick or in_flight[:1]:
            in_flight.remove(prompt)
            finished.append(prompt)
        while len(finished) >= 3 or (finished and not in_flight):
            batch, finished = finished[:3], finished[3:]
            for prompt in batch:
                running.acknowledge(prompt)
                trained[prompt.prompt_id] += 1
            state = running.state()
        if num_kills < 10 and chance.random() < 0.2:
            num_kills += 1
            running, in_flight, finished = stream(40, num_epochs=num_epochs), [], []
            running.restore(through_json(state))  # type: ignore[arg-type]
    assert trained == dict.fromkeys(ids(prompts(40)), num_epochs)
    assert running.is_consumed


def test_what_was_in_flight_is_asked_again_first_and_in_order() -> None:
    running = stream(10, shuffle=False)
    taken = running.take(5)
    running.acknowledge(taken[1])
    running.acknowledge(taken[3])
    assert running.num_in_flight == 3
    resumed = stream(10, shuffle=False)
    resumed.restore(running.state())
    assert ids(resumed.take(4)) == ["s/0", "s/2", "s/4", "s/5"]
    assert resumed.num_consumed == 2


def test_a_prompt_given_back_comes_before_new_ones() -> None:
    running = stream(10, shuffle=False)
    first, second, third = running.take(3)
    running.give_back(third)
    running.give_back(first)
    assert ids(running.take(3)) == ["s/0", "s/2", "s/3"]
    running.acknowledge(second)
    assert running.num_consumed == 1


def test_one_row_in_flight_for_two_epochs_is_consumed_twice() -> None:
    running = stream(1, num_epochs=2)
    first, second = running.take(2)
    assert first.prompt_id == second.prompt_id
    running.acknowledge(first)
    assert not running.is_consumed
    assert running.state()["floor"] == 1  # the earlier epoch's, whichever of the two was trained
    running.acknowledge(second)
    assert running.is_consumed


def test_acknowledging_twice_is_a_mistake() -> None:
    running = stream(3)
    (taken,) = running.take(1)
    running.acknowledge(taken)
    with pytest.raises(DataError, match="not in flight"):
        running.acknowledge(taken)


def test_restoring_other_data_or_another_seed_is_refused() -> None:
    state = stream(10).state()
    for other in (stream(11), stream(10, seed=5), stream(10, num_epochs=3)):
        with pytest.raises(CheckpointError, match="not these"):
            other.restore(state)


def mixed(weights: list[tuple[float, float]], curriculum_prompts: int = 0) -> PromptStream:
    pools = [Pool(prompts(7, f"s{i}"), a, b) for i, (a, b) in enumerate(weights)]
    return PromptStream(pools, seed=0, curriculum_prompts=curriculum_prompts)


def test_sources_are_drawn_by_weight_to_within_one_prompt() -> None:
    """Weights 3 and 1: any 4 consecutive prompts hold 3 of the first; each source keeps its own epochs."""
    taken = mixed([(3.0, 3.0), (1.0, 1.0)]).take(28 * 4)
    for start in range(0, len(taken), 4):
        assert Counter(p.source for p in taken[start : start + 4]) == {"s0": 3, "s1": 1}
    assert set(Counter(p.prompt_id for p in taken if p.source == "s1").values()) == {4}


def test_a_curriculum_moves_the_weights() -> None:
    """From 1:0.01 to 0:1 over 100 prompts: the first ten are easy, after 100 all are hard."""
    taken = mixed([(1.0, 0.0), (0.01, 1.0)], curriculum_prompts=100).take(150)
    assert Counter(p.source for p in taken[:10])["s0"] >= 9
    assert {p.source for p in taken[100:]} == {"s1"}
    assert 40 <= sum(p.source == "s0" for p in taken[:100]) <= 60


def test_a_mixture_resumes_where_it_was() -> None:
    unbroken = ids(mixed([(3.0, 1.0), (1.0, 2.0)], 40).take(60))
    running = mixed([(3.0, 1.0), (1.0, 2.0)], 40)
    for prompt in running.take(23):
        running.acknowledge(prompt)
    resumed = mixed([(3.0, 1.0), (1.0, 2.0)], 40)
    resumed.restore(running.state())
    assert ids(resumed.take(37)) == unbroken[23:]


def test_a_pool_without_prompts_is_refused() -> None:
    with pytest.raises(DataError, match="1 of 2 prompt pools"):
        PromptStream([Pool(prompts(2)), Pool([])], seed=0)
