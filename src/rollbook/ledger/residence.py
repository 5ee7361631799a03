"""Trajectories of agents in time: some decode while the others wait for their environments.

    a trajectory stays   D + E: its tokens at the pace of those that decode, and its calls between turns
    of n that stay       n D / (D + E) decode at once, which sets that pace
    slots                held through the calls where engines keep a prefix: what has none waits for a whole stay

So a step's last trajectory ends later than the longest response and the slowest environment alone would, engines work
with few rows for long, and stand only while every trajectory of a replica is in its environment.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from rollbook.ledger.agents import env_sigma
from rollbook.ledger.lengths import Curve, LengthDistribution, normal_cdf, normal_quantile
from rollbook.ledger.workload import Workload

_NUM_TIMES = 400
_NUM_SUM_CELLS = 2048
_NUM_DECODES = 24
_NUM_CALLS = 128
_NUM_STARTS = 24
_NUM_PACES = 4
_NUM_TOKEN_S = 6
_NUM_ROUNDS = 8
_BEYOND = 1e-4
"""Expected number of a step's trajectories beyond the largest value that is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """Of the trajectories of one step on one of `num_replicas` replicas, all admitted at once."""

    last_s: float
    """Expected end of the last one of all replicas."""
    busy_s: float
    """In which at least one trajectory of a replica decodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residence:
    """Of a workload's trajectories, on replicas whose decode step with `rows` [n] sequences takes `step_s` [n]."""

    workload: Workload
    rows: Curve
    step_s: Curve

    @property
    def env_s(self) -> float:
        """Mean seconds that a trajectory waits for its environment: the last turn ends it."""
        agent = self.workload.agent
        return agent.num_calls * agent.env_s

    @property
    def _sigma(self) -> float:
        agent = self.workload.agent
        return env_sigma(agent.env_s, agent.env_p50_s, agent.env_p99_s)

    def live(self, running: Curve | float) -> Curve:
        """Of `running` trajectories, those that decode."""
        live = running = np.asarray(running, np.float64)
        for _ in range(_NUM_ROUNDS):
            decode_s = self.workload.response_tokens * np.interp(live, self.rows, self.step_s)
            live = running * decode_s / (decode_s + self.env_s)
        return live

    def ended(self, at_s: Curve, token_s: Curve | float) -> Curve:
        """[n] probability that a trajectory, alone with its slot, has ended `at_s` [n] after it began, with tokens of
        `token_s` [n], or always as many seconds, in the mean until then."""
        work, agent, sigma = self.workload, self.workload.agent, self._sigma
        lengths = work.lengths()
        if sigma == 0:
            return 1 - lengths.survival(np.maximum(at_s - self.env_s, 0.0) / token_s) * (at_s >= 0)
        sums, cdf = call_sums(agent.env_s, sigma, agent.num_calls, work.num_sequences)
        tokens, shares = self._decodes(1.0)
        left = at_s[:, None] - np.multiply.outer(np.broadcast_to(token_s, at_s.shape), tokens)
        return np.asarray(np.interp(left, sums, cdf, left=0.0) @ shares)

    def _decodes(self, token_s: float) -> tuple[Curve, Curve]:
        """[n] seconds of decoding and [n] shares of the trajectories."""
        tokens, shares = _responses(self.workload.lengths(), self.workload.num_sequences)
        return tokens * token_s, shares

    def decode_frac(self, at_s: Curve, token_s: float) -> Curve:
        """[n] share of their stay for which those that stay longer than `at_s` [n] decode, in the mean: who stays
        long has waited for slow calls."""
        work, agent, sigma = self.workload, self.workload.agent, self._sigma
        decode_s, shares = self._decodes(token_s)
        sums, mass = np.asarray([self.env_s]), np.ones(1)
        if sigma > 0:
            sums, cdf = call_sums(agent.env_s, sigma, agent.num_calls, work.num_sequences)
            every = _NUM_SUM_CELLS // _NUM_CALLS
            sums, mass = sums[every // 2 :: every], np.diff(cdf[every - 1 :: every], prepend=0.0)
        stays_s = sums[:, None] + decode_s[None, :]
        number = (mass[:, None] * shares[None, :]).ravel()
        decoding = number * (decode_s[None, :] / stays_s).ravel()
        order = np.argsort(stays_s, axis=None)[::-1]
        longest_first = stays_s.ravel()[order]
        longer = np.searchsorted(-longest_first, -at_s, side="left")  # of them stay longer
        of_all = np.concatenate([[0.0], np.cumsum(number[order])])[longer]
        of_decoding = np.concatenate([[0.0], np.cumsum(decoding[order])])[longer]
        frac = of_decoding / np.maximum(of_all, 1e-300)
        last = max(int(np.searchsorted(-of_all, 0.0)) - 1, 0)  # beyond the longest, as the longest
        return np.asarray(np.where(of_all > 0, frac, frac[last]))

    def stay(self, *, per_replica: float, num_slots: float, num_replicas: int) -> Stay:
        """Of `per_replica` trajectories in `num_slots`, which they hold through their calls where prefixes are kept.

        A token takes as long as the trajectories that decode at its time let it, fewer and fewer: those under way, and
        who of them decodes, set the seconds of a token, which set who is under way.
        """
        work = self.workload
        keeps = work.agent.keeps_prefix and per_replica > num_slots
        first = float(num_slots) if keeps else per_replica
        later = per_replica - first
        slowest_s = float(np.interp(min(num_slots, per_replica), self.rows, self.step_s))
        # What begins at once, answers equally long and calls equally long also waits at once.
        in_step = self._sigma == 0 and float(work.lengths().survival(work.response_tokens * 1.001)) == 0
        waves = math.ceil(later / max(first, 1.0))
        mean_s = slowest_s * work.response_tokens + self.env_s
        width = (self.longest_s(slowest_s) + 1.2 * waves * mean_s) / _NUM_TIMES
        at_s = (np.arange(_NUM_TIMES) + 0.5) * width
        clock: Curve = at_s / slowest_s
        """[n] tokens that one which always decodes has made."""
        pace_s = np.geomspace(
            float(self.step_s[0]), max(slowest_s, 1.001 * float(self.step_s[0])), _NUM_TOKEN_S
        )
        at_pace = np.stack([self.ended(at_s, each) for each in pace_s]) if later > 0 else np.zeros((1, 1))
        for _ in range(_NUM_PACES):
            ended = self.ended(at_s, at_s / clock)
            inside, log_all = first * (1 - ended), first * np.log(np.maximum(ended, 1e-300))
            if later > 0:
                starts_s = self._starts_s(at_s, ended, first, later)
                after = at_s[:, None] - starts_s[None, :]
                begun = after > 0
                made = (clock[:, None] - np.interp(starts_s, at_s, clock))[begun]
                token_s = after[begun] / np.maximum(made, 1e-12)
                theirs = _between(at_pace, pace_s, token_s, after[begun] / width - 0.5)
                each = later / len(starts_s)
                left, log_ended = np.zeros(after.shape), np.full(after.shape, math.log(1e-300))
                left[begun], log_ended[begun] = 1 - theirs, np.log(np.maximum(theirs, 1e-300))
                inside = inside + each * left.sum(axis=1)
                log_all = log_all + each * log_ended.sum(axis=1)
            typical_s = float(np.interp(0.5, ended, at_s / clock))
            decoding = inside * self.decode_frac(at_s, typical_s)
            at_once = inside if in_step else decoding
            now_s = np.interp(np.minimum(np.maximum(at_once, 1.0), num_slots), self.rows, self.step_s)
            clock = np.cumsum(width / now_s)
        last_s = float((1 - np.exp(num_replicas * log_all)).sum()) * width
        busy_s = float((1 - np.exp(-decoding)).sum()) * width
        return Stay(last_s=last_s, busy_s=min(busy_s, last_s))

    def longest_s(self, token_s: float) -> float:
        """That no stay of a step is expected to pass: the longest response after the longest calls."""
        return token_s * self.workload.max_response_tokens + self._longest_calls_s()

    def _longest_calls_s(self) -> float:
        agent, sigma = self.workload.agent, self._sigma
        if sigma == 0:
            return self.env_s
        return float(call_sums(agent.env_s, sigma, agent.num_calls, self.workload.num_sequences)[0][-1])

    def _starts_s(self, at_s: Curve, ended: Curve, first: float, later: float) -> Curve:
        """[n] times at which those that waited get the slots of those that ended: a renewal process in each slot."""
        density = np.diff(ended, prepend=0.0)
        size = 2 * len(at_s)
        one = np.fft.rfft(density, size)
        freed, power = np.zeros(len(at_s)), np.ones_like(one)
        for _ in range(min(math.ceil(later / first) + 2, 64)):
            power = power * one
            freed += np.cumsum(np.fft.irfft(power, size)[: len(at_s)])
        num = min(max(round(later), 1), _NUM_STARTS)
        wanted = (np.arange(num) + 0.5) / num * later / first
        return np.asarray(np.interp(wanted, np.maximum.accumulate(freed), at_s))


def _between(table: Curve, pace_s: Curve, token_s: Curve, row: Curve) -> Curve:
    """Values of `table` [paces, times] at these seconds of a token and rows of its times, linear in both."""
    of_pace = np.log(np.maximum(token_s, pace_s[0]) / pace_s[0]) / math.log(pace_s[1] / pace_s[0])
    of_pace = np.clip(of_pace, 0.0, len(pace_s) - 1.001)
    row = np.clip(row, 0.0, table.shape[1] - 1.001)
    i, j = of_pace.astype(np.int64), row.astype(np.int64)
    di, dj = of_pace - i, row - j
    flat, at = table.ravel(), i * table.shape[1] + j
    above = at + table.shape[1]
    low = flat.take(at) * (1 - dj) + flat.take(at + 1) * dj
    high = flat.take(above) * (1 - dj) + flat.take(above + 1) * dj
    return np.asarray(low * (1 - di) + high * di)


@functools.lru_cache(maxsize=64)
def _responses(lengths: LengthDistribution, num_sequences: int) -> tuple[Curve, Curve]:
    """[n] tokens and [n] shares of the responses, finer towards the longest, which decide a maximum."""
    beyond = np.concatenate([np.geomspace(1.0, _BEYOND / num_sequences, _NUM_DECODES), [0.0]])
    return lengths.quantile(1 - (beyond[:-1] + beyond[1:]) / 2), beyond[:-1] - beyond[1:]


_SUMS: dict[tuple[float, float, float, int], tuple[Curve, Curve]] = {}


def call_sums(mean_s: float, sigma: float, num_calls: float, num_sequences: int) -> tuple[Curve, Curve]:
    """[n] seconds and [n] probability that the sum of independent log-normal calls is at most that.

    By convolution: a log-normal of the sum's mean and variance has too light a tail, and the slowest of a step's
    thousands of trajectories lies in it. A number of calls between two whole ones is a mixture of both.
    """
    key = (mean_s, sigma, num_calls, num_sequences)
    if key not in _SUMS:
        if len(_SUMS) > 64:
            _SUMS.clear()
        _SUMS[key] = _call_sums(*key)
    return _SUMS[key]


def _call_sums(mean_s: float, sigma: float, num_calls: float, num_sequences: int) -> tuple[Curve, Curve]:
    mu = math.log(mean_s) - sigma**2 / 2
    rare = _BEYOND / (num_sequences * max(num_calls, 1.0))
    top_s = math.exp(mu + sigma * float(normal_quantile(1 - max(rare, 1e-9)))) + 1.5 * num_calls * mean_s
    edges = np.linspace(0.0, top_s, _NUM_SUM_CELLS + 1)
    with np.errstate(divide="ignore"):
        single = normal_cdf((np.log(edges) - mu) / sigma)
    one = np.fft.rfft(np.diff(single), 2 * _NUM_SUM_CELLS)
    low = math.floor(num_calls)
    cdf = np.zeros(_NUM_SUM_CELLS)
    for count, share in ((low, 1 - (num_calls - low)), (low + 1, num_calls - low)):
        if share > 0:
            mass = np.fft.irfft(one**count, 2 * _NUM_SUM_CELLS)[:_NUM_SUM_CELLS]
            cdf += share * np.cumsum(mass)
    # The middle of a cell stands for it: of a sum of k, k halves.
    ends = edges[1:] + (num_calls - 1) / 2 * (edges[1] - edges[0])
    return ends, np.clip(np.maximum.accumulate(cdf), 0.0, 1.0)
