"""An asynchronous step by expected values: what the simulator plays with drawn lengths, with the share of them instead.

    engines   one replica stands for all: batches of a step's trajectories, each as parts that began together, of which
              the share S(age) still runs; their number sets the seconds of a token, slots free as parts end
    trainer   waits for the last response of its batch, trains, publishes, and the staleness bound admits the next one

Batches that wait for their last response let the next one catch up; both are trained at once, and those after them are
admitted together and wait for the longest of all: under a bound of 1 a long step alternates with a short one. Where a
trainer that is hardly slower takes them one by one they spread again. Neither is assumed here: it follows from the
line of the trainer, played until a cycle of bound + 1 steps takes as long as the one before it.

A batch is done when the last of N is, which is at a time t with the probability P(t) = product of (1 - S(age))^n. A
trainer that is free at f then begins at f + integral of (1 - P) from f: the expected later one of two varying sides.

Left out: chance, replicas that get more than their share, and sequences that a full KV pool pushes out.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from rollbook.ledger.account import StepAccount
from rollbook.ledger.layout import ReplicaLayout
from rollbook.ledger.lengths import Curve
from rollbook.ledger.residence import Residence
from rollbook.ledger.step import is_colocated
from rollbook.planner.decoding import decode_steps_s
from rollbook.planner.request import PlanRequest

_NUM_CELLS = 12
"""Of the longest response: the engines move on by one at a time."""
_MOST_CELLS_PER_STEP = 32
_NUM_AGES = 257
_NUM_ROWS = 24
_NUM_AHEAD = 16
_NUM_PACES = 4
_BEYOND = 0.01
"""Expected number of a step's trajectories that are longer than the longest one looked at."""
_LEAST_P = 1e-4
"""Probability that a batch is done from which its expected end is looked at."""
_SAME_FRAC = 0.003
"""By which two cycles may differ and be called one."""
_MOST_CYCLES = 6
_LONGEST_CYCLE = 6
"""Steps: under a wider bound the cycle of bound + 1 steps is no longer one long step and many short ones."""
_MOST_CELLS = 2000
_MOST_WAVES = 24


@dataclass(frozen=True, slots=True)
class SteadyStep:
    """A step of an asynchronous mode once its cycle repeats."""

    step_s: float
    busy_s: float
    """Of it, in which the mean replica decodes, prefills or judges."""


class _Parts:
    """Trajectories of a batch that began together, for all batches: position, number, how many run; oldest first.

    Lists, not arrays: there are few at a time, and calls on arrays of a few numbers are most of their cost.
    """

    def __init__(self) -> None:
        self.began_at: list[float] = []
        self.number: list[float] = []
        self.alive: list[float] = []
        self.head = 0
        """The first that may still run."""
        self.first: list[int] = []
        """By batch: its first part."""

    def add(self, batch: int, number: float, position: float) -> None:
        if batch == len(self.first):
            self.first.append(len(self.number))
        self.began_at.append(position)
        self.number.append(number)
        self.alive.append(number)

    def drop(self, before: float) -> None:
        """Forget the parts that began before this position."""
        while self.head < len(self.number) and self.began_at[self.head] <= before:
            self.head += 1

    def running(self) -> range:
        return range(self.head, len(self.number))

    def of(self, batch: int) -> range:
        """The parts of `batch` that may still run."""
        end = self.first[batch + 1] if batch + 1 < len(self.first) else len(self.number)
        return range(max(self.first[batch], self.head), end)


class _Table:
    """Values at equally spaced ages from 0 on, linear between them and constant beyond the last."""

    def __init__(self, ages: Curve, values: Curve) -> None:
        self.scale = (len(ages) - 1) / float(ages[-1])
        self.values: list[float] = [*values.tolist(), float(values[-1])]
        self.last = len(ages) - 1

    def at(self, age: float) -> float:
        place = age * self.scale
        i = int(place)
        if i >= self.last:
            return self.values[-1]
        low = self.values[i]
        return low + (place - i) * (self.values[i + 1] - low)


class _Engines:
    """One replica of many, which stands for all of them. Ages are seconds at the pace `_token_s`."""

    def __init__(self, request: PlanRequest, account: StepAccount, layout: ReplicaLayout, slots: int) -> None:
        work, rollout, agent = request.workload, account.rollout, request.workload.agent
        self.now_s = self.busy_s = 0.0
        self.running = 0.0
        """Trajectories that have a slot."""
        self.num_replicas = rollout.num_replicas
        self.wider = 1.0
        """Replicas that decode, lent ones with them, over the own ones."""
        self._slots = slots
        self._per_replica = work.num_sequences / rollout.num_replicas
        self._parts = _Parts()
        self._queue: deque[tuple[int, float]] = deque()
        """Batch, and its trajectories that have no slot yet."""
        self._position = self._stall_s = 0.0
        is_agent = agent.num_turns > 1 and agent.env_s > 0
        self._holds_slots = agent.keeps_prefix or not is_agent
        self._context = work.prompt_tokens + work.observation_tokens / 2
        self._tabulate(request, layout)
        rows = min(self._per_replica, slots)
        if is_agent:
            every = np.arange(slots + 2)
            typical_s = np.asarray(self._base_s) + self._typical_context * np.asarray(self._context_s)
            stays = Residence(workload=work, rows=every.astype(np.float64), step_s=typical_s)
            self._token_s = float(np.interp(float(stays.live(rows)), every, typical_s))
            self._ages, self._survival = _stay_survival(stays, self._token_s, work.num_sequences)
            self._decode_fracs = stays.decode_frac(self._ages, self._token_s)
        else:
            self._token_s = self._step_s(rows, self._typical_context)
            longest = float(work.lengths().quantile(1 - _BEYOND / work.num_sequences))
            tokens = np.linspace(0.0, longest, _NUM_AGES)
            self._ages, self._survival = tokens * self._token_s, work.lengths().survival(tokens)
            self._decode_fracs = np.ones(_NUM_AGES)
        self._is_agent = is_agent
        self._survival[-1] = 0.0
        self._log_ended = np.log1p(-np.minimum(self._survival, 1 - 1e-12))
        self._survives = _Table(self._ages, self._survival)
        self._ends = _Table(self._ages, self._log_ended)
        self._decodes = _Table(self._ages, self._decode_fracs)
        self._longest = float(self._ages[-1])
        self._ahead = np.concatenate([[0.0], np.geomspace(self._longest / 256, self._longest, _NUM_AHEAD)])
        self._ahead_width, self._ahead_step = np.gradient(self._ahead), np.diff(self._ahead)
        mean = max(float(np.trapezoid(self._survival, self._ages)), 1e-12)
        step = self._per_replica / slots * mean if self._holds_slots else mean
        cell = max(self._longest / _NUM_CELLS, step / _MOST_CELLS_PER_STEP)
        self._cell = min(cell, max(mean / 2, self._longest / _NUM_CELLS))
        # Prompts are read before a trajectory decodes, what its turns add along its way.
        share = 1 / agent.num_turns if is_agent else 1.0
        self._start_s = account.seconds.prefill / self._per_replica * share
        self._turns_s = account.seconds.prefill / self._per_replica * (1 - share) / mean
        self._judge_s = account.seconds.reward / self._per_replica

    def _tabulate(self, request: PlanRequest, layout: ReplicaLayout) -> None:
        """Seconds of a decode step by whole rows: a part for itself, and one for each token of context."""
        lengths = request.workload.lengths()
        longest = self._context + request.workload.response_tokens
        rows = np.geomspace(1.0, self._slots + 1, _NUM_ROWS)
        base_s = decode_steps_s(request, layout, rows, 1.0)
        slope_s = (decode_steps_s(request, layout, rows, longest) - base_s) / (longest - 1)
        every = np.arange(self._slots + 2)
        self._base_s: list[float] = np.interp(every, rows, base_s).tolist()
        self._context_s: list[float] = np.interp(every, rows, slope_s).tolist()
        self._typical_context = self._context + lengths.mean_square() / (2 * lengths.mean_tokens)

    def _step_s(self, rows: float, context: float) -> float:
        """Of one decode step."""
        low = int(rows)
        part = rows - low
        base_s = self._base_s[low] + part * (self._base_s[low + 1] - self._base_s[low])
        return base_s + context * (
            self._context_s[low] + part * (self._context_s[low + 1] - self._context_s[low])
        )

    def admit(self, batch: int) -> None:
        """Queue a step's trajectories."""
        self._queue.append((batch, self._per_replica))

    def fill(self) -> None:
        """Give what is free to those that wait."""
        self._parts.drop(self._position - self._longest)
        free = self._slots * self.wider - self.running if self._holds_slots else math.inf
        started = self._start(free, self._position)
        self.running += started
        self._stall_s += started * self._start_s / self.wider

    def _start(self, number: float, position: float) -> float:
        """Give slots to as many as wait, and return them."""
        started = 0.0
        while self._queue and number - started > 1e-9:
            batch, left = self._queue.popleft()
            taken = min(left, number - started)
            self._parts.add(batch, taken, position)
            started += taken
            if taken < left - 1e-9:
                self._queue.appendleft((batch, left - taken))
        return started

    def _pace(self, running: float, context: float, frac: float) -> tuple[float, float]:
        """Seconds of one of age, and trajectories that decode, where `running` are under way with this much context.

        Args:
            frac: of them that decode at the pace of `_token_s`.
        """
        running /= self.wider
        if not self._is_agent:
            # What runs has itself beside it: a mean below 1 is few replicas with one, not all with less.
            rows = min(max(running + max(1 - running / self._per_replica, 0.0), 1.0), self._slots)
            return self._step_s(rows, context) / self._token_s, running
        live, slower = running, 1.0
        for _ in range(_NUM_PACES):
            # Beyond the slots they take turns.
            rows = min(max(live, 1.0), self._slots)
            slower = self._step_s(rows, self._typical_context) / self._token_s * max(live / self._slots, 1.0)
            live = running * frac * slower / (frac * slower + 1 - frac)
        # What turns add is read while others decode and environments go on: p = frac slower / (1 - r / p) + 1 - frac.
        reading, calls = self._turns_s * running, 1 - frac
        together = reading + frac * slower + calls
        pace = (together + math.sqrt(max(together**2 - 4 * calls * reading, 0.0))) / 2
        return pace, min(live, self._slots)

    def advance(self, limit_s: float) -> float:
        """Go on by a cell, or by `limit_s` where that is less; returns the seconds."""
        parts, running, position = self._parts, self.running, self._position
        waiting = sum(left for _, left in self._queue) if self._holds_slots else 0.0
        cell, seconds, ended, live = self._cell, 0.0, 0.0, 0.0
        later: list[float] = []
        for _ in range(4):
            number, aged, decoding = self._survivors(cell, later)
            ended = max(running - sum(later), 0.0)
            mean = running - ended / 2 + min(ended, waiting) / 2
            age = aged / max(2 * mean, 1e-9)
            frac = decoding / max(number, 1e-300) if self._is_agent else 1.0
            pace, live = self._pace(mean, self._context + age / self._token_s, frac)
            seconds = cell * pace + self._stall_s
            if seconds <= limit_s * (1 + 1e-9):
                break
            cell = (limit_s - self._stall_s) / pace
            if cell < 1e-4 * self._cell:
                cell = 0.0
                break
        seconds = min(seconds, limit_s)
        started = max(sum(parts.number[parts.head :]), live, 1e-9)
        if cell == 0.0:
            self._stall_s = max(self._stall_s - seconds, 0.0)
        else:
            parts.alive[parts.head :] = later
            replaced = self._start(min(ended, waiting), position + cell / 2)
            self.running = running - ended + replaced
            self._stall_s = (ended * self._judge_s + replaced * self._start_s) / self.wider
            self._position += cell
        self.busy_s += seconds * (1 - (1 - live / started) ** started)
        self.now_s += seconds
        return seconds

    def _survivors(self, cell: float, later: list[float]) -> tuple[float, float, float]:
        """Sums over all parts at both ends of a cell: how many run, their ages, and how many of them
        decode (of agents). `later` gets how many of each run at its end.

        Nearly all of the planner's time is spent here, so the tables are read without a call.
        """
        parts, position, half = self._parts, self._position, cell / 2
        scale, last, survival = self._survives.scale, self._survives.last, self._survives.values
        fracs = self._decodes.values if self._is_agent else None
        number = aged = decoding = 0.0
        later.clear()
        head = parts.head
        for began_at, began, alive in zip(
            parts.began_at[head:], parts.number[head:], parts.alive[head:], strict=True
        ):
            age = position - began_at
            place = (age + cell) * scale
            i = int(place)
            if i >= last:
                left = began * survival[-1]
            else:
                low = survival[i]
                left = began * (low + (place - i) * (survival[i + 1] - low))
            later.append(left)
            both = alive + left
            number += both
            aged += both * (age + half)
            if fracs is not None:
                place = (age + half) * scale
                i = int(place)
                if i >= last:
                    decoding += both * fracs[-1]
                else:
                    low = fracs[i]
                    decoding += both * (low + (place - i) * (fracs[i + 1] - low))
        return number, aged, decoding

    def done(self, batch: int) -> float:
        """Probability that the last response of `batch` is there."""
        parts = self._parts
        if batch >= len(parts.first) or (self._queue and self._queue[0][0] <= batch):
            return 0.0
        log_ended = sum(
            parts.number[i] * self._ends.at(self._position - parts.began_at[i]) for i in parts.of(batch)
        )
        return math.exp(self.num_replicas * log_ended)

    def expected_wait_s(self, batch: int) -> float:
        """From now to the last response of `batch`, all of which have begun; as far as it is not there."""
        mine = self._parts.of(batch)
        began_at = np.asarray(self._parts.began_at[mine.start : mine.stop])
        number = np.asarray(self._parts.number[mine.start : mine.stop])
        ages = self._position - began_at[:, None] + self._ahead
        missing = 1 - np.exp(self.num_replicas * (number @ np.interp(ages, self._ages, self._log_ended)))
        frac = 1.0
        if self._is_agent:
            survivors = number[:, None] * np.interp(ages, self._ages, self._survival)
            weights = survivors * (missing * self._ahead_width)[None, :]
            fracs = np.interp(ages, self._ages, self._decode_fracs)
            frac = float(fracs.ravel() @ weights.ravel()) / max(float(weights.sum()), 1e-300)
        pace, _ = self._pace(self.running, self._typical_context, frac)
        return float((self._ahead_step * (missing[1:] + missing[:-1]) / 2.0).sum()) * pace


def steady_step(
    request: PlanRequest, account: StepAccount, layout: ReplicaLayout, *, slots: int, num_lent: float = 0.0
) -> SteadyStep | None:
    """The steady step of `account` under the staleness bound; None where that takes too many cells to find out: many
    waves of trajectories, of which the last hardly counts.

    Args:
        slots: of a replica, for the trajectories of all steps that are in flight.
        num_lent: replicas that waiting training GPUs form, `lend_switch_s` of the request after they began to wait.
    """
    waves = request.workload.num_sequences / account.rollout.num_replicas / slots
    if waves > _MOST_WAVES:
        return None
    engines = _Engines(request, account, layout, slots)
    ahead = request.max_staleness_steps + 1
    cycle = min(ahead, _LONGEST_CYCLE)
    own_s = account.train.total_s + account.seconds.other + account.seconds.switch
    steps_s: list[float] = []
    busy_s: list[float] = []
    num_admitted, free_at_s, waited_s, trained_at_s = 0, 0.0, 0.0, math.inf
    lends, switch_s = False, request.lend_switch_s
    for _ in range(_MOST_CELLS):
        step = len(steps_s)
        while num_admitted < step + ahead:
            engines.admit(num_admitted)
            num_admitted += 1
        if engines.now_s >= trained_at_s * (1 - 1e-12):
            engines.now_s += account.seconds.sync
            steps_s.append(engines.now_s - free_at_s)
            busy_s.append(engines.busy_s)
            free_at_s, waited_s, trained_at_s = engines.now_s, 0.0, math.inf
            if _repeats(steps_s, cycle):
                break
            continue
        engines.fill()
        limit_s, is_done = trained_at_s - engines.now_s, 1.0
        if trained_at_s == math.inf:
            is_done = engines.done(step)
            if is_done > _LEAST_P:
                wait_s = waited_s + engines.expected_wait_s(step)
                limit_s = free_at_s + wait_s - engines.now_s
                if limit_s <= 1e-6 * engines.now_s:
                    lent_s = switch_s if engines.wider > 1 else 0.0
                    lends, engines.wider = num_lent > 0 and wait_s > 4 * switch_s, 1.0
                    trained_at_s = engines.now_s + own_s + lent_s
                    if is_colocated(account.mode):
                        engines.now_s = trained_at_s
                    continue
            if lends and engines.wider == 1.0:
                left_s = free_at_s + switch_s - engines.now_s
                if left_s <= 1e-12 * engines.now_s:
                    engines.wider = 1 + num_lent / engines.num_replicas
                else:
                    limit_s = min(limit_s, left_s)
        if engines.running < 1e-9:  # nothing runs and nothing waits
            engines.now_s += limit_s
        else:
            waited_s += engines.advance(limit_s) * (1 - is_done)
    if len(steps_s) <= cycle:
        return None
    kept = max(len(steps_s) - 2 * cycle, cycle)
    num = len(steps_s) - kept
    return SteadyStep(step_s=sum(steps_s[kept:]) / num, busy_s=(busy_s[-1] - busy_s[kept - 1]) / num)


def _repeats(steps_s: list[float], cycle: int) -> bool:
    """Whether the last two cycles took equally long, or enough of them were looked at."""
    if len(steps_s) < 3 * cycle or len(steps_s) % cycle:
        return False
    last_s, before_s = sum(steps_s[-cycle:]), sum(steps_s[-2 * cycle : -cycle])
    return abs(last_s - before_s) <= _SAME_FRAC * last_s or len(steps_s) >= _MOST_CYCLES * cycle


def _stay_survival(stays: Residence, token_s: float, num_sequences: int) -> tuple[Curve, Curve]:
    """[n] seconds, [n] share of the trajectories that are still under way so long after they began."""
    at_s = np.linspace(0.0, stays.longest_s(token_s), 4 * _NUM_AGES)
    survival = 1 - stays.ended(at_s, token_s)
    survival[0] = 1.0
    last = min(int(np.searchsorted(-survival, -_BEYOND / num_sequences)), len(at_s) - 1)
    ages = np.linspace(0.0, at_s[max(last, 1)], _NUM_AGES)
    return ages, np.interp(ages, at_s, survival)
