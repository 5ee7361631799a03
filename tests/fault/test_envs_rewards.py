"""Scorers that fail, hang, lie or use signals: a failure by cause, never a zero. BR-047, BR-097."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbook.envs.config import RewardConfig
from rollbook.envs.rewards.functions import find_function
from rollbook.envs.rewards.process import ScorerProcess
from rollbook.envs.rewards.result import RewardResult
from rollbook.envs.rewards.scorer import Scorer
from rollbook.envs.rewards.self_test import require_proven, self_test
from rollbook.errors import ConfigError, RewardError
from rollbook.types import FailureKind, Prompt

PATIENCE_S = 250.0
"""Deadline of what must succeed: a busy machine is no failure."""
PATIENT = {"deadline_s": PATIENCE_S, "start_deadline_s": PATIENCE_S}

SCORERS = '''
import os, signal, threading, time

def right(response, task, **_):
    return float(response == task["answer"])

def with_alarm(response, task, **_):
    """As maths checkers bound their time: an alarm, which only a main thread may set."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(5)
    try:
        return float(response == task["answer"])
    finally:
        signal.alarm(0)

def with_alarm_swallowed(response, task, **_):
    try:
        return with_alarm(response, task)
    except Exception:
        return 0.0

def raising(response, task, **_):
    raise KeyError("tests")

def exiting(response, task, **_):
    raise SystemExit(7)

def text(response, task, **_):
    return "1.0"

def nan(response, task, **_):
    return float("nan")

def talking(response, task, **_):
    print("hello" * 100)
    os.write(1, b"not json\\n")
    return 1

def dying(response, task, **_):
    os._exit(3)

def parts(response, task, *, bonus=0.0, **_):
    return {"score": bonus + float(response == task["answer"]), "length": len(response)}

def always(response, task, **_):
    return 1.0

released = threading.Event()

def hanging(response, task, **_):
    if response != "quick":
        released.wait(60)
    return 1.0

async def asynchronous(response, task, **_):
    return float(response == task["answer"])

async def asynchronous_hanging(response, task, **_):
    import asyncio
    await asyncio.sleep(60)
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The scorers above, as a user's module on the path."""
    (tmp_path / "scorers_of_a_user.py").write_text(SCORERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "scorers_of_a_user", raising=False)
    yield "scorers_of_a_user"
    if "scorers_of_a_user" in sys.modules:
        vars(sys.modules["scorers_of_a_user"])["released"].set()  # no thread of this test outlives it


def prompt(answer: Any = "42", *, source: str = "maths", prompt_id: str = "row-0") -> Prompt:
    return Prompt(
        prompt_id=prompt_id, prompt_ids=np.array([1], np.int32), source=source, task={"answer": answer}
    )


async def score(
    term: dict[str, Any], response: str = "42", *, deadline_s: float = PATIENCE_S
) -> RewardResult:
    scorer = Scorer(
        RewardConfig.model_validate(
            {
                "terms": [term],
                "num_workers": 1,
                **PATIENT,
                "deadline_s": deadline_s,
            }
        )
    )
    await scorer.start()
    try:
        return await scorer.score(response, prompt())
    finally:
        await scorer.close()


ISOLATIONS = ["inline", "thread", "process"]


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_score_arrives_from_everywhere(module: str, isolation: str) -> None:
    result = await score({"function": f"{module}:right", "isolation": isolation})
    assert result == RewardResult(reward=1.0, terms={"right": 1.0, "score": 1.0})


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("raising", "KeyError: 'tests'"),
        ("exiting", "SystemExit: 7"),
        ("text", "str '1.0', not a number"),
        ("nan", "nan, not a finite number"),
    ],
)
async def test_br047_a_broken_scorer_is_a_failure(
    module: str, isolation: str, function: str, says: str
) -> None:
    result = await score({"function": f"{module}:{function}", "isolation": isolation})
    assert result.reward is None
    assert result.failure is not None
    assert result.failure.kind is FailureKind.REWARD
    assert says in result.failure.message


async def test_br047_a_real_zero_is_a_reward(module: str) -> None:
    result = await score({"function": f"{module}:right"}, "43")
    assert result.reward == 0.0
    assert result.failure is None


@pytest.mark.parametrize(
    ("function", "isolation"),
    [("hanging", "thread"), ("hanging", "process"), ("asynchronous_hanging", "auto")],
)
async def test_br047_a_hung_scorer_is_a_timeout(module: str, function: str, isolation: str) -> None:
    result = await score({"function": f"{module}:{function}", "isolation": isolation}, deadline_s=0.05)
    assert result.reward is None
    assert result.failure is not None
    assert result.failure.kind is FailureKind.TIMEOUT
    assert "no answer in 0.05 s" in result.failure.message


async def test_a_hung_process_is_replaced(module: str) -> None:
    config = {"terms": [{"function": f"{module}:hanging", "isolation": "process"}], "num_workers": 1}
    scorer = Scorer(RewardConfig.model_validate(config | PATIENT))
    await scorer.start()
    try:
        first = asyncio.create_task(scorer.score("slow", prompt()))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (await scorer.score("quick", prompt())).reward == 1.0
    finally:
        await scorer.close()


async def test_hung_threads_are_counted_until_they_end(module: str) -> None:
    scorer = Scorer(
        RewardConfig.model_validate(
            {"terms": [{"function": f"{module}:hanging", "isolation": "thread"}], "deadline_s": 0.02}
        )
    )
    for _ in range(2):
        assert (await scorer.score("slow", prompt())).failure is not None
    assert scorer.num_abandoned_threads == scorer.values()["env/num_leased"].result() == 2
    hung = [t for t in threading.enumerate() if t.name == "reward-hanging"]
    vars(__import__(module))["released"].set()
    for thread in hung:
        await asyncio.to_thread(thread.join)
    await asyncio.sleep(0)
    assert scorer.num_abandoned_threads == 0


async def test_a_scorer_that_prints_does_not_speak_into_the_replies(module: str) -> None:
    result = await score({"function": f"{module}:talking", "isolation": "process"})
    assert result.reward == 1.0


async def test_a_scorer_process_that_dies_is_a_failure_and_the_next_call_works(module: str) -> None:
    process = ScorerProcess([f"{module}:dying", f"{module}:right"], start_deadline_s=PATIENCE_S)
    try:
        with pytest.raises(RewardError, match="exit code 3"):
            await process.call(f"{module}:dying", "42", {"answer": "42"}, {}, deadline_s=PATIENCE_S)
        again = await process.call(f"{module}:right", "42", {"answer": "42"}, {}, deadline_s=PATIENCE_S)
        assert again == {"score": 1.0}
    finally:
        await process.kill()


async def test_terms_are_weighted_and_named(module: str) -> None:
    config = RewardConfig.model_validate(
        {
            "terms": [
                {"function": f"{module}:parts", "weight": 2.0, "options": {"bonus": 0.5}},
                {"function": "numeric", "weight": 0.25},
                {"function": f"{module}:raising", "sources": ["code"]},
            ],
            **PATIENT,
        }
    )
    result = await Scorer(config).score("42", prompt())
    assert result.reward == 3.25  # 2 x 1.5 + 0.25 x 1
    assert result.terms == {"parts": 1.5, "parts.length": 2.0, "numeric": 1.0, "score": 3.25}


async def test_one_failed_term_leaves_no_reward(module: str) -> None:
    config = RewardConfig.model_validate(
        {"terms": [{"function": "exact"}, {"function": f"{module}:raising"}], **PATIENT}
    )
    result = await Scorer(config).score("42", prompt())
    assert (result.reward, result.terms) == (None, {})


async def test_a_source_without_a_term_is_a_config_error() -> None:
    config = RewardConfig.model_validate({"terms": [{"function": "exact", "sources": ["code"]}]})
    with pytest.raises(ConfigError, match="source 'maths'"):
        await Scorer(config).score("42", prompt())


async def test_async_scorers_run_on_the_loop_and_in_a_process(module: str) -> None:
    for isolation in ("auto", "process"):
        result = await score({"function": f"{module}:asynchronous", "isolation": isolation})
        assert result.reward == 1.0


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("exakt", "did you mean 'exact'"),
        ("scorers_of_a_user:rigth", "did you mean 'right'"),
        ("no_such_module:f", "there is no module 'no_such_module'; searched: "),
    ],
)
async def test_a_function_that_is_not_there_is_named_at_the_start(
    module: str, function: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        find_function(function)
    assert says in str(caught.value)
    scorer = Scorer(
        RewardConfig.model_validate({"terms": [{"function": function, "isolation": "process"}], **PATIENT})
    )
    with pytest.raises(ConfigError) as caught:
        await scorer.start()
    assert says in str(caught.value)


# ---- BR-097: alarms, and the self-test -----------------------------------------------------------------------


async def test_br097_alarms_work_where_there_is_a_main_thread(module: str) -> None:
    """Four right answers each, from the event loop's thread and from a scorer process."""
    for isolation in ("inline", "process"):
        term = {"function": f"{module}:with_alarm", "isolation": isolation}
        scorer = Scorer(RewardConfig.model_validate({"terms": [term], "num_workers": 2, **PATIENT}))
        await scorer.start()
        try:
            results = await asyncio.gather(*(scorer.score("42", prompt()) for _ in range(4)))
        finally:
            await scorer.close()
        assert [result.reward for result in results] == [1.0] * 4
    assert signal.alarm(0) == 0


async def test_br097_an_alarm_on_a_thread_is_a_failure_not_a_zero(module: str) -> None:
    result = await score({"function": f"{module}:with_alarm", "isolation": "thread"})
    assert result.failure is not None
    assert "signal only works in main thread" in result.failure.message


PROMPTS = [prompt(answer, prompt_id=f"row-{answer}") for answer in ("42", "7", "3")]


async def outcome(term: dict[str, Any], prompts: list[Prompt] = PROMPTS) -> list[str]:
    """Start-up as a run does it: the notes, or the error."""
    scorer = Scorer(RewardConfig.model_validate({"terms": [term], "num_workers": 1, **PATIENT}))
    await scorer.start()
    try:
        return require_proven(await self_test(scorer, prompts))
    finally:
        await scorer.close()


async def test_br097_a_swallowed_alarm_fails_the_self_test_loudly(module: str) -> None:
    with pytest.raises(ConfigError, match="gives the reference answer '42' of row-42 0, not 1") as caught:
        await outcome({"function": f"{module}:with_alarm_swallowed", "isolation": "thread"})
    assert "isolation = 'process'" in caught.value.remedy
    assert await outcome({"function": f"{module}:with_alarm_swallowed", "isolation": "process"}) == []


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("always", "full marks to wrong answers too, for example '7'"),
        ("raising", "the reference answer '42' of row-42 fails: .*KeyError"),
        ("text", "not a number"),
    ],
)
async def test_the_self_test_names_what_is_wrong(module: str, function: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        await outcome({"function": f"{module}:{function}"})


async def test_a_source_without_answers_is_said_to_be_unproven(module: str) -> None:
    notes = await outcome({"function": f"{module}:right"}, [prompt(None)])
    assert notes == ["source 'maths' has no reference answers: its reward is not proven by the self-test"]


async def test_terms_about_something_else_are_left_out(module: str) -> None:
    assert await outcome({"function": f"{module}:always", "is_tested": False}) != []
    assert await outcome({"function": "exact"}) == []
    assert await outcome({"function": "digits"}, PROMPTS[:1]) == []  # one prompt: its answer, doubled


# ---- the task libraries --------------------------------------------------------------------------------------


async def test_math_verify_scores_in_its_own_process() -> None:
    pytest.importorskip("math_verify")
    scorer = Scorer(
        RewardConfig.model_validate({"terms": [{"function": "math_verify"}], "num_workers": 1, **PATIENT})
    )
    await scorer.start()
    try:
        cases = [(r"\boxed{\frac{1}{2}}", "0.5"), ("70000", "70,000"), ("the answer is 19", "18")]
        results = [await scorer.score(given, prompt(wanted)) for given, wanted in cases]
    finally:
        await scorer.close()
    assert [result.reward for result in results] == [1.0, 1.0, 0.0]


def gym_tasks(name: str, num_prompts: int = 3) -> list[Mapping[str, Any]]:
    pytest.importorskip("reasoning_gym")
    from rollbook.envs.reasoning_gym import tasks

    return [task for _, task in tasks(name, {}, num_prompts=num_prompts, seed=5)]


def gym_score() -> Callable[..., float]:
    from rollbook.envs.rewards.reasoning_gym import reasoning_gym

    return reasoning_gym


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward", "arc_agi", "word_ladder"])
def test_reasoning_gym_answers_score_full_marks(name: str) -> None:
    """arc_agi among them: its scorer tells tuples from lists, which JSON does not."""
    for task in gym_tasks(name):
        assert gym_score()(task["answer"], task) == 1.0
        assert gym_score()("", task) == 0.0


def test_reasoning_gym_text_that_its_parser_raises_on_is_wrong_not_failed() -> None:
    for task in gym_tasks("prime_factorization"):
        assert gym_score()("qq zz", task) == 0.0
        assert gym_score()(task["answer"], task) == 1.0


def test_reasoning_gym_tasks_without_an_answer_have_none() -> None:
    assert all("answer" not in task for task in gym_tasks("graph_color"))


def test_reasoning_gym_refuses_by_name() -> None:
    pytest.importorskip("reasoning_gym")
    from rollbook.envs.reasoning_gym import tasks

    with pytest.raises(ConfigError, match="did you mean 'chain_sum'"):
        list(tasks("chain_sums", {}, num_prompts=1, seed=0))
    with pytest.raises(ConfigError, match="refuses the options"):
        list(tasks("chain_sum", {"min_term": 3}, num_prompts=1, seed=0))


def test_reasoning_gym_notices_another_version() -> None:
    (task,) = gym_tasks("chain_sum", 1)
    with pytest.raises(ValueError, match="made another question"):
        gym_score()("1", {**task, "question": "something else"})


async def test_built_ins_that_cannot_hang_cost_no_thread() -> None:
    scorer = Scorer(RewardConfig.model_validate({"terms": [{"function": "exact"}]}))
    before = threading.active_count()
    assert all([(await scorer.score("42", prompt())).reward == 1.0 for _ in range(100)])
    assert threading.active_count() == before


async def test_how_full_the_workers_are_and_what_failed_is_reported_once(module: str) -> None:
    """Five responses at two threads: two at work, three waiting; then a time-out and an error, counted apart."""
    gate = threading.Event()
    config = RewardConfig.model_validate(
        {**PATIENT, "terms": [{"function": f"{module}:right"}], "num_workers": 2}
    )
    scorer = Scorer(config)
    plain = scorer.terms[0]
    await scorer.start()

    def gated(response: str, task: Mapping[str, Any], **_: Any) -> float:
        gate.wait(PATIENCE_S)
        if response == "broken":
            raise KeyError(response)
        return 1.0

    scorer.terms = [replace(plain, function=gated)]
    calls = [asyncio.create_task(scorer.score(text, prompt())) for text in ("42", "42", "42", "42", "broken")]
    for _ in range(20):
        await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*calls)
    values = {name: value.result() for name, value in scorer.values().items()}
    assert values.pop("reward/score_s") > 0
    assert values == {
        "env/num_active": 2,
        "env/capacity": 2,
        "env/queue_depth": 3,
        "env/num_timeouts": 0,
        "env/num_errors": 1,
        "env/num_leased": 0,
    }
    again = {name: value.result() for name, value in scorer.values().items()}
    assert (again["env/num_active"], again["env/queue_depth"], again["env/num_errors"]) == (0, 0, 0)
    await scorer.close()


async def test_what_is_scored_without_a_worker_has_no_capacity() -> None:
    config = RewardConfig.model_validate({"terms": [{"function": "exact"}]})
    scorer = Scorer(config)
    await scorer.start()
    await scorer.score("42", prompt())
    assert set(scorer.values()) == {"reward/score_s"}


@pytest.mark.parametrize(
    ("written", "options", "told"),
    [
        (
            "(prompt, response, answer)",
            {},
            r"is called as own\(response, task\): missing a required argument: 'answer'",
        ),
        ("(response)", {}, r"is own\(response\) and is called as own\(response, task\): too many positional"),
        ("(response, task)", {"scale": 2}, r"own\(response, task, scale=...\): got an unexpected keyword"),
    ],
)
def test_a_function_that_cannot_be_called_is_told_how_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, options: dict[str, Any], told: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = f"called_otherwise_{len(written)}"
    (tmp_path / f"{module}.py").write_text(f"def own{written}:\n    return 1.0\n")
    term = {"function": f"{module}:own", "options": options}
    config = RewardConfig.model_validate({"terms": [term], "search_path": [str(tmp_path)]})
    with pytest.raises(ConfigError, match=told) as refused:
        Scorer(config)
    assert "def own(response: str, task: dict, **options)" in refused.value.remedy
