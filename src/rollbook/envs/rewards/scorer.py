"""A run's scorer: all terms of `[reward]`, each isolated as it needs, every call under a deadline.

response ──► term 1 (inline)  ─┐
         ──► term 2 (thread)  ─┼─► weighted sum = "score" ──► RewardResult
         ──► term 3 (process) ─┤   one failure ──► RewardResult without a reward
         ──► term 4 (judge)   ─┘
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from rollbook.envs.config import JUDGE, RewardConfig, RewardTermConfig
from rollbook.envs.rewards.functions import (
    REWARDS,
    RewardFunction,
    add_search_path,
    find_function,
    prepare,
    require_signature,
)
from rollbook.envs.rewards.process import ProcessPool
from rollbook.envs.rewards.result import SCORE, Isolation, RewardResult, checked_score
from rollbook.errors import ConfigError, DeadlineError, RewardError, RunError
from rollbook.observe.values import Last, Peak, Ratio, Total, Values
from rollbook.types import Failure, FailureKind, Prompt

Judge = Callable[[str, Prompt], Awaitable[object]]
"""`await judge(response, prompt)` -> what a scorer may return; has a deadline of its own."""
MAX_ABANDONED_THREADS = 32
"""Threads past their deadline that may still run; a thread cannot be killed."""


@dataclass(frozen=True, slots=True)
class Term:
    """One scorer of the run."""

    config: RewardTermConfig
    name: str
    function: RewardFunction | None
    """None where it runs in a process and is imported only there, and for a judge."""
    isolation: Isolation

    @classmethod
    def of(cls, config: RewardTermConfig, folders: Sequence[str]) -> Term:
        isolation = config.isolation
        if config.function == JUDGE:
            return cls(config, config.name or JUDGE, None, "inline")
        if isolation == "auto":
            isolation = REWARDS[config.function].isolation if config.function in REWARDS else "thread"
        function = None if isolation == "process" else find_function(config.function, folders)
        if function is not None:
            require_signature(config.function, function, config.options)
        return cls(config, config.name or config.function.rpartition(":")[2], function, isolation)

    def applies_to(self, prompt: Prompt) -> bool:
        return not self.config.sources or prompt.source in self.config.sources


@dataclass(slots=True)
class Load:
    """What the scorer did since it was last asked: how full its workers were, how long a score took, what failed."""

    num_active: int = 0
    num_waiting: int = 0
    most_active: int = 0
    most_waiting: int = 0
    num_timeouts: int = 0
    num_errors: int = 0
    num_scores: int = 0
    scores_s: float = 0.0

    @contextlib.asynccontextmanager
    async def worker(self, free: asyncio.Semaphore) -> AsyncIterator[None]:
        """A free thread or process, waited for."""
        self.num_waiting += 1
        # Who need not wait is no queue.
        self.most_waiting = max(self.most_waiting, self.num_waiting if free.locked() else 0)
        try:
            await free.acquire()
        finally:
            self.num_waiting -= 1
        self.num_active += 1
        self.most_active = max(self.most_active, self.num_active)
        try:
            yield
        finally:
            self.num_active -= 1
            free.release()

    def values(self, *, capacity: int) -> Values:
        """Readings since the last call. Args: capacity: workers there are; 0 says nothing of them."""
        values: Values = {"reward/score_s": Ratio(self.scores_s, self.num_scores)}
        if capacity:
            values |= {
                "env/num_active": Peak(self.most_active),
                "env/capacity": Last(capacity),
                "env/queue_depth": Peak(self.most_waiting),
                "env/num_timeouts": Total(self.num_timeouts),
                "env/num_errors": Total(self.num_errors),
            }
        self.most_active, self.most_waiting = self.num_active, 0
        self.num_timeouts = self.num_errors = self.num_scores = 0
        self.scores_s = 0.0
        return values


class Scorer:
    """Scores responses. `start` before the first call, `close` at the end, both on the loop that scores.

    Args:
        judges: by the name of their term, for terms with a `judge`.
    """

    def __init__(self, config: RewardConfig, judges: Mapping[str, Judge] | None = None) -> None:
        self.config = config
        add_search_path(config.search_path)
        self.terms = [Term.of(term, config.search_path) for term in config.terms]
        self._judges = judges or {}
        self.num_abandoned_threads = 0
        """Threads past their deadline that have not ended yet."""
        self._load = Load()
        self._free = {kind: asyncio.Semaphore(config.num_workers) for kind in ("thread", "process")}
        self._processes: ProcessPool | None = None

    async def start(self) -> None:
        """Start what the terms need. Raises ConfigError for a function that cannot be imported."""
        functions = sorted({t.config.function for t in self.terms if t.isolation == "process"})
        if functions:
            self._processes = ProcessPool(
                functions,
                num_workers=self.config.num_workers,
                start_deadline_s=self.config.start_deadline_s,
                folders=self.config.search_path,
            )
            await self._processes.start()
        for function in {t.config.function for t in self.terms if t.function is not None}:
            await asyncio.to_thread(prepare, function)

    async def close(self) -> None:
        """Kill the scorer processes; safe to call twice."""
        if self._processes is not None:
            await self._processes.close()
            self._processes = None

    def values(self) -> Values:
        """Readings of `reward/score_s` and, where terms run on threads or in processes, of `env/...`, since the last
        call. What is not given back are threads past their deadline: a process is killed."""
        kinds = {term.isolation for term in self.terms} & set(self._free)
        values = self._load.values(capacity=len(kinds) * self.config.num_workers)
        return values | ({"env/num_leased": Last(self.num_abandoned_threads)} if kinds else {})

    async def score(self, response: str, prompt: Prompt) -> RewardResult:
        """The reward of one response, or the failure that stands in its place. Never raises for a scorer's fault.

        Raises:
            ConfigError: no term applies to the prompt's source.
        """
        terms = [term for term in self.terms if term.applies_to(prompt)]
        if not terms:
            raise ConfigError(
                f"no reward term applies to source {prompt.source!r} (prompt {prompt.prompt_id})",
                "add it to reward.terms.sources of a term, or leave those empty",
            )
        began_at_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(self._outcome(term, response, prompt)) for term in terms]
        outcomes = [call.result() for call in calls]
        self._load.num_scores += 1
        self._load.scores_s += time.monotonic() - began_at_s
        failures = Counter(outcome.kind for outcome in outcomes if isinstance(outcome, Failure))
        self._load.num_timeouts += failures[FailureKind.TIMEOUT]
        self._load.num_errors += failures[FailureKind.REWARD]
        values: dict[str, float] = {}
        total = 0.0
        for term, outcome in zip(terms, outcomes):
            if isinstance(outcome, Failure):
                return RewardResult(reward=None, failure=outcome)
            values[term.name] = outcome[SCORE]
            values |= {f"{term.name}.{part}": value for part, value in outcome.items() if part != SCORE}
            total += term.config.weight * outcome[SCORE]
        return RewardResult(reward=total, terms=values | {SCORE: total})

    async def _outcome(self, term: Term, response: str, prompt: Prompt) -> dict[str, float] | Failure:
        try:
            if term.config.function == JUDGE:
                return checked_score(await self._judges[term.name](response, prompt))
            return await self._call(term, response, prompt.task)
        except DeadlineError as error:
            return Failure(kind=FailureKind.TIMEOUT, message=f"reward {term.name!r}: {error.what}")
        except TimeoutError:
            message = (
                f"reward {term.name!r} gave no answer in {self.config.deadline_s:g} s (reward.deadline_s)"
            )
            return Failure(kind=FailureKind.TIMEOUT, message=message)
        except RunError as error:
            return Failure(kind=FailureKind.REWARD, message=f"reward {term.name!r}: {error.what}")
        except (
            Exception,
            SystemExit,
        ) as error:  # whatever a scorer raises, also sys.exit(): the reward is unknown
            message = f"reward {term.name!r}: {type(error).__name__}: {error}"
            return Failure(kind=FailureKind.REWARD, message=message)

    async def _call(self, term: Term, response: str, task: Mapping[str, JsonValue]) -> dict[str, float]:
        deadline_s, options = self.config.deadline_s, term.config.options
        if term.isolation == "process":
            if self._processes is None:
                raise RewardError("the scorer was not started", "await Scorer.start() before scoring")
            async with self._load.worker(self._free["process"]):
                return await self._processes.call(
                    term.config.function, response, task, options, deadline_s=deadline_s
                )
        assert term.function is not None
        if inspect.iscoroutinefunction(term.function):
            async with asyncio.timeout(deadline_s):
                return checked_score(await term.function(response, task, **options))
        if term.isolation == "inline":
            return checked_score(term.function(response, task, **options))
        async with self._load.worker(self._free["thread"]):
            return checked_score(await self._on_thread(term, term.function, response, task))

    async def _on_thread(
        self, term: Term, function: RewardFunction, response: str, task: Mapping[str, JsonValue]
    ) -> object:
        """A thread of its own, not a pool's: one that hangs neither holds a place nor the end of the program."""
        if self.num_abandoned_threads >= MAX_ABANDONED_THREADS:
            raise RewardError(
                f"{self.num_abandoned_threads} earlier calls still run past their deadline",
                "set isolation = 'process' for this term: a process can be killed",
            )
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[object] = loop.create_future()

        def settle(value: object, error: BaseException | None) -> None:
            if answer.cancelled():
                self.num_abandoned_threads -= 1
            elif error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)

        def work() -> None:
            value: object = None
            error: BaseException | None = None
            try:
                value = function(response, task, **term.config.options)
            except BaseException as raised:  # the thread's end would be silence until the deadline
                error = raised
                if not isinstance(raised, Exception):
                    error = RewardError(f"{type(raised).__name__}: {raised}", "mend the reward function")
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, value, error)

        threading.Thread(target=work, name=f"reward-{term.name}", daemon=True).start()
        try:
            async with asyncio.timeout(self.config.deadline_s):
                return await answer
        except (TimeoutError, asyncio.CancelledError):
            if answer.cancelled():
                self.num_abandoned_threads += 1
            raise
