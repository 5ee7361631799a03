"""Before the first step: each scorer must know its own reference answer, and a wrong one.

A scorer whose exceptions are swallowed somewhere gives zero to everything, and training on it looks like a hard
task. Here it fails by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollbook.envs.rewards.result import RewardResult
from rollbook.envs.rewards.scorer import Scorer, Term
from rollbook.errors import ConfigError
from rollbook.types import Prompt

TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What was found for one source."""

    source: str
    num_prompts: int
    """Prompts whose reference answer was scored; 0: the source has none, and nothing is proven."""
    problems: tuple[str, ...]


async def self_test(scorer: Scorer, prompts: Iterable[Prompt]) -> list[SelfTest]:
    """Score reference answers (`task["answer"]`) and those of other prompts, a few of each source."""
    by_source: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_source[prompt.source].append(prompt)
    return [await _test_source(scorer, source, held) for source, held in sorted(by_source.items())]


def require_proven(tests: Sequence[SelfTest]) -> list[str]:
    """Raise ConfigError when a scorer failed its test; return a sentence for each source that had none."""
    failed = [test for test in tests if test.problems]
    if failed:
        others = ", ".join(repr(test.source) for test in failed[1:])
        raise ConfigError(
            f"the reward failed its self-test: source {failed[0].source!r}: {'; '.join(failed[0].problems)}"
            + (f"; and so for {others}" if others else ""),
            "mend the scorer or the answer column; a function that uses signals needs isolation = 'process'; a "
            "term that is not about the answer has is_tested = false",
        )
    return [
        f"source {test.source!r} has no reference answers: its reward is not proven by the self-test"
        for test in tests
        if test.num_prompts == 0
    ]


async def _test_source(scorer: Scorer, source: str, prompts: Sequence[Prompt]) -> SelfTest:
    terms = [t for t in scorer.terms if t.config.is_tested and t.applies_to(prompts[0])]
    answered = [prompt for prompt in prompts if prompt.task.get("answer") is not None]
    chosen = answered[: scorer.config.self_test_prompts]
    if not chosen or not terms:
        return SelfTest(source, 0, ())
    examples: list[str] = []
    wrong_results: list[tuple[str, RewardResult]] = []
    for prompt in chosen:
        reference = str(prompt.task["answer"])
        result = await scorer.score(reference, prompt)
        examples += _reference_problems(terms, reference, prompt, result)[:1]
        wrong = _wrong_answer(reference, answered)
        wrong_results.append((wrong, await scorer.score(wrong, prompt)))
    if examples:  # what the wrong answers get says nothing more then
        count = f" ({len(examples)} of {len(chosen)} reference answers)" if len(chosen) > 1 else ""
        return SelfTest(source, len(chosen), (examples[0] + count,))
    problems = [problem for term in terms for problem in _wrong_problems(term, wrong_results)]
    return SelfTest(source, len(chosen), tuple(dict.fromkeys(problems)))


def _short(message: str) -> str:
    """The first line, at most 200 characters."""
    line = message.splitlines()[0] if message else message
    return line if len(line) <= 200 else line[:197] + "..."


def _wrong_answer(reference: str, answered: Sequence[Prompt]) -> str:
    """The answer to another question, or one that nothing asks for."""
    others = (str(prompt.task["answer"]) for prompt in answered)
    return next((other for other in others if other.strip() != reference.strip()), reference * 2 + "1")


def _reference_problems(
    terms: Sequence[Term], reference: str, prompt: Prompt, result: RewardResult
) -> list[str]:
    if result.failure is not None:
        return [
            f"the reference answer {reference!r:.60} of {prompt.prompt_id} fails: "
            + _short(result.failure.message)
        ]
    return [
        f"{term.name!r} gives the reference answer {reference!r:.60} of {prompt.prompt_id} "
        f"{result.terms[term.name]:g}, not {term.config.full_marks:g}"
        for term in terms
        if abs(result.terms[term.name] - term.config.full_marks) > TOLERANCE
    ]


def _wrong_problems(term: Term, results: Sequence[tuple[str, RewardResult]]) -> list[str]:
    """A wrong answer may be right by chance, or in a task with several right ones; not all of them can."""
    scored = [(wrong, result.terms[term.name]) for wrong, result in results if result.failure is None]
    if not scored:
        failure = results[0][1].failure
        assert failure is not None
        return [f"every wrong answer fails, for example {results[0][0]!r:.60}: {_short(failure.message)}"]
    if all(value >= term.config.full_marks - TOLERANCE for _, value in scored):
        return [f"{term.name!r} gives full marks to wrong answers too, for example {scored[0][0]!r:.60}"]
    return []
