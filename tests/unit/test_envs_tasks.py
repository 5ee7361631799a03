"""Built-in tasks and built-in scorers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rollbook.envs.config import DataConfig, RewardConfig, SourceConfig
from rollbook.envs.rewards.builtin import digits, exact, last_number, numeric
from rollbook.envs.rewards.result import checked_score
from rollbook.envs.tasks import TASKS, find_task, problems
from rollbook.errors import ConfigError


def shown(name: str, number: int, **options: Any) -> str:
    task = find_task(name)
    problem = task.problem(task.options.model_validate(options), number)
    return problem.prompt + problem.answer


def test_addition_in_three_writings() -> None:
    """Problem 734 of two digits is 7 + 34 = 41."""
    assert shown("addition", 734) == "07+34=140"
    assert shown("addition", 734, answer="padded") == "07+34=041"
    assert shown("addition", 734, answer="natural") == "07+34=41"
    assert shown("addition", 9999, answer="padded") == "99+99=198"


def test_strings() -> None:
    """27 in base 26 over two letters is "bb"; 310 sorts to 013."""
    assert shown("reverse", 27, length=3) == "abb>bba"
    assert shown("sort_digits", 310, length=3) == "310>013"


@pytest.mark.parametrize("name", TASKS)
def test_a_task_stays_within_its_alphabet_and_repeats_nothing(name: str) -> None:
    drawn = list(problems(name, {}, num_prompts=200, seed=1))
    assert len({p.prompt for p in drawn}) == 200
    assert set("".join(p.prompt + p.answer for p in drawn)) <= set(TASKS[name].alphabet)


def test_all_problems_are_there_and_a_draw_repeats_by_seed() -> None:
    assert len(list(problems("addition", {}, num_prompts=0, seed=0))) == 10_000
    first = [p.prompt for p in problems("addition", {}, num_prompts=5, seed=3)]
    assert first == [p.prompt for p in problems("addition", {}, num_prompts=5, seed=3)]
    assert first != [p.prompt for p in problems("addition", {}, num_prompts=5, seed=4)]


@pytest.mark.parametrize(
    ("name", "options", "num_prompts", "says"),
    [
        ("additon", {}, 1, "did you mean 'addition'"),
        ("addition", {"digits": 2}, 1, "'digits'.*\n.*num_digits"),
        ("addition", {"num_digits": 99}, 1, "less than or equal to 9"),
        ("addition", {"num_digits": 1}, 101, "has 100 problems"),
        ("reverse", {"length": 8}, 0, "set num_prompts"),
    ],
)
def test_a_task_refuses_by_name(name: str, options: dict[str, Any], num_prompts: int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        list(problems(name, options, num_prompts=num_prompts, seed=0))
    import re

    assert re.search(says, str(caught.value), re.DOTALL), str(caught.value)


def test_exact_and_digits() -> None:
    assert exact(" 640\n", {"answer": "640"}) == 1.0
    assert exact("64", {"answer": 64}) == 1.0
    cases = [("640", "641", 1 / 3), ("6401", "640", 3 / 8), ("", "640", 0.0), ("640", "640", 1.0)]
    for given, wanted, expected in cases:  # half of: two right of three, three of four, none, all and exact
        got = digits(given, {"answer": wanted})
        assert got["score"] == pytest.approx(expected)
        assert got["exact"] == float(given == wanted)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The profit is $70,000.", 70_000),
        ("#### 18", 18),
        ("16 - 3 = 13 eggs", 13),
        ("5-3", 3),
        ("-3.50 degrees", -3.5),
        ("1e3", 1000),
        (".5", 0.5),
        ("no number", None),
    ],
)
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_numeric_compares_values() -> None:
    assert numeric("it is 18.0", {"answer": "... #### 18"}) == 1.0
    assert numeric("it is 19", {"answer": "18"}) == 0.0
    assert numeric("nothing", {"answer": "18"}) == 0.0
    with pytest.raises(ValueError, match="holds no number"):
        numeric("18", {"answer": "eighteen"})


@pytest.mark.parametrize(
    "returned", ["1", b"1", None, float("nan"), float("inf"), [1.0], {"value": 1.0}, {"score": "x"}, {}]
)
def test_what_is_no_finite_number_is_no_score(returned: object) -> None:
    with pytest.raises(ValueError, match="not a|without 'score'"):
        checked_score(returned)


def test_scalars_of_numpy_are_numbers() -> None:
    import numpy as np

    assert checked_score(np.float32(0.5)) == {"score": 0.5}
    assert checked_score({"score": np.int64(1), "length": 3}) == {"score": 1.0, "length": 3.0}


@pytest.mark.parametrize(
    ("section", "fields", "says"),
    [
        (SourceConfig, {}, "names nothing to read"),
        (SourceConfig, {"task": "addition", "path": "x"}, "names task and path"),
        (SourceConfig, {"reasoning_gym": "chain_sum"}, "set num_prompts"),
        (SourceConfig, {"hub": "openai/gsm8k"}, "has no split"),
        (SourceConfig, {"path": "x", "template": "no place"}, "no {prompt}"),
        (SourceConfig, {"path": "x", "answer_pattern": "####"}, "no group"),
        (SourceConfig, {"path": "x", "answer_pattern": "("}, "no regular expression"),
        (DataConfig, {"sources": []}, "at least 1"),
        (DataConfig, {"sources": [{"path": "a/x.jsonl"}, {"path": "b/x.jsonl"}]}, "two data sources"),
        (DataConfig, {"sources": [{"path": "a", "weight": 1}, {"path": "b"}]}, "to each or to none"),
        (DataConfig, {"sources": [{"path": "a", "weight": 1}], "num_epochs": 2}, "no common epoch"),
        (DataConfig, {"sources": [{"path": "a"}], "curriculum_prompts": 9}, "no effect"),
        (DataConfig, {"sources": [{"path": "a"}], "system_prompt": "be brief"}, "no effect"),
        (RewardConfig, {"terms": []}, "is empty"),
        (RewardConfig, {"terms": [{"function": "exact"}, {"function": "exact"}]}, "two reward.terms"),
        (RewardConfig, {"terms": [{"function": "exact", "name": "score"}]}, "call it otherwise"),
    ],
)
def test_sections_refuse_what_contradicts(section: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        section.model_validate(fields)
