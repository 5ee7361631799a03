"""The engines of a simulation: replicas with slots, the queue before them, and the events between two of the trainer's
waits.

    queue ──► slot of a replica ──► turn ends ──► environment ──► ... ──► finished ──► reward
                 (all sequences of a replica grow by one token a decode step)

When the KV pool of a replica is full, the youngest of its sequences goes back to the front of the queue and is
prefilled again where it finds room.

Between two events of a replica its number of live sequences is constant, so the seconds of k decode steps are
a closed form (a quadratic in k), and a turn costs one event rather than one for each token.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from rollbook.errors import PlanError
from rollbook.planner.sim_parts import SimReplica, SimSequence
from rollbook.planner.sim_result import Interval
from rollbook.planner.sim_scenario import Scenario

_TURN_ENDS, _ENV_ANSWERS, _REWARDED, _FAILS, _RECOVERS, _LENT, _POOL_FULL = range(7)
_POOL_WATERMARK = 0.99
"""A sequence is admitted while the pool is filled up to this share, so that it does not push out another at once."""


class Engines:
    """All replicas of a scenario on one clock. The trainer's line moves it with `elapse` and `run_until`."""

    def __init__(
        self,
        scenario: Scenario,
        rng: np.random.Generator,
        finish: Callable[[SimSequence, bool], None],
    ) -> None:
        """`finish` takes every trajectory that ended, and whether it has a reward."""
        self.scenario = scenario
        self.now_s = 0.0
        self.version = 0
        """Of the weights that sample."""
        self.replicas = [
            SimReplica(i, scenario.slots_per_replica)
            for i in range(scenario.num_replicas + scenario.num_lent_replicas)
        ]
        self.own = self.replicas[: scenario.num_replicas]
        self.intervals: list[Interval] = []
        self.curve: list[tuple[float, int]] = []
        self.num_events = 0
        self.num_preemptions = 0
        self.lost_tokens = 0.0
        self._rng = rng
        self._finish = finish
        self._events: list[tuple[float, int, int, object, int]] = []
        self._num_pushed = 0
        self._queue: deque[SimSequence] = deque()
        self._is_queue_open = True
        self._lent = self.replicas[scenario.num_replicas :]
        for replica in self._lent:
            replica.is_down = True
        self._lent_at_s = math.nan
        self._lent_from_s = 0.0
        self._num_live = 0
        self._curve_stride = 1
        self._num_curve_calls = 0
        if math.isfinite(scenario.replica_mtbf_s):
            first_s = rng.exponential(scenario.replica_mtbf_s, scenario.num_replicas)
            for replica, after_s in zip(self.own, first_s, strict=True):
                self._push(float(after_s), _FAILS, replica)

    # -- what the trainer's line asks for ------------------------------------------------------------

    def elapse(self, seconds: float, name: str) -> None:
        """The trainer is busy with `name`; the replicas that are not held go on."""
        if seconds > 0:
            from_s, until_s = self.now_s, self.now_s + seconds
            while self._events and self._events[0][0] <= until_s:
                self._handle_next()
            self.now_s = until_s
            self.note("trainer", name, from_s)

    def run_until(self, is_met: Callable[[], bool], what: str) -> None:
        """Handle events until `is_met`.

        Raises:
            PlanError: nothing is left to happen.
        """
        while not is_met():
            if not self._events:
                raise PlanError(
                    f"the simulation waits for {what} at {self.now_s:.1f} s and nothing is left to happen",
                    "with arrival order and `wait`, max_staleness_steps must be at least 1",
                )
            self._handle_next()

    def queue(self, sequences: Iterable[SimSequence]) -> None:
        """Put admitted sequences behind those that wait, and fill the free slots."""
        self._queue.extend(sequences)
        self._fill_all()

    def hold(self) -> None:
        """Decoding stands still on all replicas."""
        for replica in self.replicas:
            if not replica.is_held:
                self._advance(replica, self.now_s)
                replica.is_held = True
                replica.held_at_s = self.now_s
                replica.stamp += 1
                if replica.num_live:
                    self._close_interval(replica)

    def release(self) -> None:
        """Decoding goes on."""
        for replica in self.replicas:
            replica.is_held = False
            replica.time_s = self.now_s
            if replica.ready_at_s > replica.held_at_s:  # prefill that was left, or came up, during the pause
                replica.ready_at_s += self.now_s - replica.held_at_s
            if replica.num_live:
                replica.work_from_s = self.now_s
            self._schedule(replica)
        self._fill_all()

    def drain(self) -> None:
        """No waiting sequence gets a slot until the running ones are finished."""
        self._is_queue_open = False
        from_s = self.now_s
        self.run_until(
            lambda: not any(replica.residents for replica in self.replicas), "running responses to drain"
        )
        self.note("trainer", "drain", from_s)
        self._is_queue_open = True

    def abort_running(self) -> None:
        """Running responses go back to the front of the queue and start over under the next version."""
        for replica in self.replicas:
            for sequence in self._evacuate(replica, keeps_tokens=False):
                sequence.version = -1
                self._queue.appendleft(sequence)

    def recompute_kv(self) -> None:
        """The context of running responses is prefilled again."""
        for replica in self.replicas:
            self._stall(replica, replica.context)

    def lend(self) -> None:
        """The trainer begins to wait: after a switch its GPUs generate."""
        if self._lent:
            self._lent_at_s = self.now_s + self.scenario.lend_switch_s
            self._push(self._lent_at_s, _LENT, None)

    def take_back(self) -> float:
        """The wait is over: what ran on lent GPUs goes on elsewhere, and the switch back is paid for.

        Returns the seconds in which they generated.
        """
        if math.isnan(self._lent_at_s):
            return 0.0
        was_lent, self._lent_at_s = self.now_s >= self._lent_at_s, math.nan
        if not was_lent:
            return 0.0
        from_s = self.now_s
        for replica in self._lent:
            self._withdraw(replica, keeps_tokens=True)
        self._fill_all()
        self.elapse(self.scenario.lend_switch_s, "switch")
        return from_s - self._lent_from_s

    def seconds_used(self) -> tuple[float, float]:
        """Busy seconds and live sequences x seconds up to now, over the replicas that are no loan."""
        for replica in self.replicas:
            self._advance(replica, self.now_s)
        return sum(r.busy_s for r in self.own), sum(r.slot_s for r in self.own)

    def note(self, lane: str, name: str, from_s: float) -> None:
        """A bar of the timeline that ends now."""
        if self.now_s > from_s:
            self.intervals.append(Interval(lane, name, from_s, self.now_s))

    def close(self) -> None:
        """End the bars that are still open."""
        for replica in self.replicas:
            self._close_interval(replica)

    # -- slots -------------------------------------------------------------------------------------

    def _fill_all(self) -> None:
        """Queue to slots, a group at a time onto the emptiest replica: its members share one prefill."""
        if not (self._queue and self._is_queue_open):
            return
        open_replicas = [(-r.free, r.idx) for r in self.replicas if r.free and not r.is_down]
        heapq.heapify(open_replicas)
        touched: set[int] = set()
        while self._queue and open_replicas:
            replica = self.replicas[heapq.heappop(open_replicas)[1]]
            if not self._has_room(replica, self._queue[0]):
                continue  # it takes none now; the next emptiest may
            if replica.idx not in touched:
                self._advance(replica, self.now_s)
                touched.add(replica.idx)
            group = self._queue[0].group
            while (
                self._queue
                and replica.free
                and self._queue[0].group is group
                and self._has_room(replica, self._queue[0])
            ):
                self._place(self._queue.popleft(), replica)
            if replica.free:
                heapq.heappush(open_replicas, (-replica.free, replica.idx))
        for idx in touched:
            self._schedule(self.replicas[idx])

    def _has_room(self, replica: SimReplica, sequence: SimSequence) -> bool:
        """Whether the pool of `replica` takes the context of `sequence`."""
        held = replica.context + replica.parked + sequence.context
        return replica.num_live == 0 or held <= _POOL_WATERMARK * self.scenario.kv_pool_tokens

    def _preempt(self, replica: SimReplica) -> None:
        """The youngest sequence gives up slot and KV, and waits at the front of the queue with its tokens."""
        self._advance(replica, self.now_s)
        replica.stamp += 1
        if replica.num_live > 1:
            youngest = max(replica.heap, key=lambda entry: entry[1])
            replica.heap.remove(youngest)
            heapq.heapify(replica.heap)
            end, _, sequence = youngest
            self._leave(sequence, replica, sequence.turn_left - (end - replica.clock))
            self._free(sequence, replica)
            sequence.group.replicas.discard(replica.idx)
            self._queue.appendleft(sequence)
            self.num_preemptions += 1
        self._schedule(replica)
        self._fill_all()

    def _place(self, sequence: SimSequence, replica: SimReplica) -> None:
        """Give `sequence` a slot on `replica`, which stands at now, and prefill what it does not hold."""
        group = sequence.group
        if sequence.version < 0:
            sequence.version = self.version
        group.oldest = min(group.oldest, sequence.version)
        fresh = sequence.context
        if self.scenario.shares_prompt and sequence.sampled == 0 and replica.idx in group.replicas:
            fresh = 0.0  # a sibling brought the prompt
        group.replicas.add(replica.idx)
        replica.free -= 1
        replica.residents.add(sequence)
        sequence.replica = replica
        self._join(sequence, replica, fresh)

    def _join(self, sequence: SimSequence, replica: SimReplica, prefill_tokens: float) -> None:
        """`sequence` takes part in the next decode steps until its turn ends."""
        self._stall(replica, prefill_tokens)
        if replica.num_live == 0:
            replica.context = 0.0
            replica.work_from_s = self.now_s
        replica.num_live += 1
        self._num_live += 1
        replica.context += sequence.context
        heapq.heappush(replica.heap, (replica.clock + sequence.turn_left, sequence.order, sequence))

    def _stall(self, replica: SimReplica, prefill_tokens: float) -> None:
        """Decoding on `replica` stands while it prefills, after what it has to prefill already."""
        from_s = max(replica.ready_at_s, replica.held_at_s if replica.is_held else self.now_s)
        replica.ready_at_s = from_s + prefill_tokens * self.scenario.prefill_token_s

    def _judge(self, replica: SimReplica) -> float:
        """Decoding stands while the engine judges a trajectory, after what it has to do already; when that is done."""
        replica.ready_at_s = max(replica.ready_at_s, self.now_s) + self.scenario.judge_s
        return replica.ready_at_s

    def _leave(self, sequence: SimSequence, replica: SimReplica, num_sampled: float) -> None:
        """`sequence` stops decoding; what it sampled is part of its context now."""
        sequence.context += num_sampled
        sequence.sampled += num_sampled
        sequence.turn_left -= num_sampled
        replica.num_live -= 1
        self._num_live -= 1
        replica.context -= sequence.context
        if replica.num_live == 0:
            self._close_interval(replica)

    def _seconds(self, replica: SimReplica, num_steps: float) -> float:
        """Seconds of `num_steps` decode steps; the context of each live sequence grows by one a step."""
        n, table = replica.num_live, self.scenario.decode
        return num_steps * (table.base_s[n] + table.context_s[n] * (replica.context + n * num_steps / 2))

    def _steps_in(self, replica: SimReplica, seconds: float) -> float:
        """The inverse of `_seconds`."""
        n, table = replica.num_live, self.scenario.decode
        a = table.context_s[n] * n / 2
        b = table.base_s[n] + table.context_s[n] * replica.context
        if a * seconds < 1e-9 * b * b:
            return seconds / b if b > 0 else replica.heap[0][0] - replica.clock
        return (math.sqrt(b * b + 4 * a * seconds) - b) / (2 * a)

    def _advance(self, replica: SimReplica, to_s: float) -> None:
        """Decode up to `to_s`, short of the next end of a turn."""
        if replica.is_held or replica.is_down:
            replica.time_s = to_s
            return
        from_s = max(replica.time_s, min(replica.ready_at_s, to_s))
        if replica.num_live:
            replica.busy_s += to_s - replica.time_s
            replica.slot_s += replica.num_live * (to_s - replica.time_s)
            if to_s > from_s:
                num_steps = min(self._steps_in(replica, to_s - from_s), replica.heap[0][0] - replica.clock)
                replica.clock += num_steps
                replica.context += num_steps * replica.num_live
        replica.time_s = to_s

    def _schedule(self, replica: SimReplica) -> None:
        """Announce the next end of a turn on `replica`; an earlier announcement is void."""
        replica.stamp += 1
        if replica.num_live and not (replica.is_held or replica.is_down):
            start_s = max(replica.time_s, replica.ready_at_s)
            num_steps = replica.heap[0][0] - replica.clock
            kind = _TURN_ENDS
            room = self.scenario.kv_pool_tokens - replica.context - replica.parked
            if replica.num_live > 1 and room < replica.num_live * num_steps * (1 - 1e-9):
                num_steps, kind = max(room, 0.0) / replica.num_live, _POOL_FULL
            self._push(start_s + self._seconds(replica, num_steps), kind, replica, replica.stamp)

    def _evacuate(self, replica: SimReplica, *, keeps_tokens: bool) -> list[SimSequence]:
        """Take every live sequence off `replica`, youngest first."""
        live = sorted(((end, s) for end, _, s in replica.heap), key=lambda pair: -pair[1].order)
        for end, sequence in live:
            self._leave(sequence, replica, sequence.turn_left - (end - replica.clock))
            if not keeps_tokens:
                self.lost_tokens += sequence.sampled
                sequence.turns_left = sequence.num_turns
                sequence.turn_left = sequence.turn_tokens
                sequence.context = self.scenario.prompt_tokens
                sequence.sampled = 0.0
            replica.residents.discard(sequence)
            replica.free += 1
        replica.heap.clear()
        replica.context = 0.0
        return [sequence for _, sequence in live]

    # -- events ------------------------------------------------------------------------------------

    def _push(self, at_s: float, kind: int, subject: object, stamp: int = 0) -> None:
        self._num_pushed += 1
        heapq.heappush(self._events, (at_s, self._num_pushed, kind, subject, stamp))

    def _handle_next(self) -> None:
        at_s, _, kind, subject, stamp = heapq.heappop(self._events)
        if kind in (_TURN_ENDS, _POOL_FULL):
            assert isinstance(subject, SimReplica)
            if subject.stamp == stamp:
                self.now_s = at_s
                self._end_turns(subject) if kind == _TURN_ENDS else self._preempt(subject)
            return
        self.now_s = at_s
        self.num_events += 1
        if kind == _ENV_ANSWERS:
            assert isinstance(subject, SimSequence)
            self._continue(subject)
        elif kind == _REWARDED:
            assert isinstance(subject, SimSequence)
            self._finish(subject, True)
        elif kind == _FAILS:
            assert isinstance(subject, SimReplica)
            self._fail(subject)
        elif kind == _LENT:
            if at_s == self._lent_at_s:
                self._lent_from_s = at_s
                for replica in self._lent:
                    replica.is_down = False
                    replica.time_s = at_s
                self._fill_all()
        else:
            assert isinstance(subject, SimReplica)
            subject.is_down = False
            subject.time_s = self.now_s
            self._push(
                self.now_s + float(self._rng.exponential(self.scenario.replica_mtbf_s)), _FAILS, subject
            )
            self._fill_all()

    def _end_turns(self, replica: SimReplica) -> None:
        """Every sequence whose turn ends at this decode step leaves, and its slot goes to the queue."""
        s = self.scenario
        busy_s = self.now_s - replica.time_s
        replica.busy_s += busy_s
        replica.slot_s += replica.num_live * busy_s
        end = replica.heap[0][0]
        replica.context += (end - replica.clock) * replica.num_live
        replica.clock, replica.time_s = end, self.now_s
        while replica.heap and replica.heap[0][0] <= end + 1e-9:
            sequence = heapq.heappop(replica.heap)[2]
            self.num_events += 1
            self._leave(sequence, replica, sequence.turn_left)
            sequence.turns_left -= 1
            if sequence.turns_left and not sequence.fails:
                wait_s = float(s.env_s(self._rng, 1)[0]) if s.env_s is not None else 0.0
                if s.holds_slot_in_env:
                    sequence.is_parked = True
                    replica.parked += sequence.context
                else:
                    self._free(sequence, replica)
                self._push(self.now_s + wait_s, _ENV_ANSWERS, sequence)
                continue
            self._free(sequence, replica)
            if sequence.fails or (s.reward_s is None and not s.judge_s):
                self._finish(sequence, not sequence.fails)
            else:
                judged_at_s = self._judge(replica) if s.judge_s else self.now_s
                elsewhere_s = float(s.reward_s(self._rng, 1)[0]) if s.reward_s is not None else 0.0
                self._push(judged_at_s + elsewhere_s, _REWARDED, sequence)
        if self._is_queue_open and not replica.is_down:
            while self._queue and replica.free and self._has_room(replica, self._queue[0]):
                self._place(self._queue.popleft(), replica)
        if s.judge_s and replica.num_live == 0:
            replica.busy_s += (
                replica.ready_at_s - self.now_s
            )  # with sequences beside it, these count its time
        self._note_live()
        self._schedule(replica)

    def _free(self, sequence: SimSequence, replica: SimReplica) -> None:
        replica.free += 1
        replica.residents.discard(sequence)
        self._unpark(sequence, replica)
        sequence.replica = None

    def _unpark(self, sequence: SimSequence, replica: SimReplica) -> None:
        if sequence.is_parked:
            sequence.is_parked = False
            replica.parked -= sequence.context

    def _continue(self, sequence: SimSequence) -> None:
        """The environment answered: its tokens are prefilled and the next turn begins."""
        observed = self.scenario.observation_tokens
        replica = sequence.replica
        if replica is not None:
            self._unpark(sequence, replica)
        sequence.context += observed
        sequence.turn_left = sequence.turn_tokens
        if replica is None:
            self._queue.append(sequence)
            self._fill_all()
            return
        self._advance(replica, self.now_s)
        self._join(sequence, replica, observed)
        self._schedule(replica)

    def _fail(self, replica: SimReplica) -> None:
        """The replica dies: live sequences go to the front of the queue, those in an environment lose it."""
        s = self.scenario
        self._withdraw(replica, keeps_tokens=s.keeps_tokens_of_lost_replica)
        self._push(self.now_s + s.replica_recovery_s, _RECOVERS, replica)
        self._fill_all()

    def _withdraw(self, replica: SimReplica, *, keeps_tokens: bool) -> None:
        """Take `replica` out of service; what it ran goes to the front of the queue."""
        self._advance(replica, self.now_s)
        self._queue.extendleft(self._evacuate(replica, keeps_tokens=keeps_tokens))
        for sequence in list(replica.residents):
            self._free(sequence, replica)
        replica.is_down = True
        replica.stamp += 1

    # -- notes -------------------------------------------------------------------------------------

    def _note_live(self) -> None:
        """Every `stride`-th reading: the curve stays below 40,000 points however long the run."""
        self._num_curve_calls += 1
        if self._num_curve_calls % self._curve_stride == 0:
            self.curve.append((self.now_s, self._num_live))
            if len(self.curve) >= 40_000:
                self.curve = self.curve[::2]
                self._curve_stride *= 2

    def _close_interval(self, replica: SimReplica) -> None:
        if replica.work_from_s < self.now_s:
            self.intervals.append(
                Interval(f"replica {replica.idx}", "decode", replica.work_from_s, self.now_s)
            )
        replica.work_from_s = math.nan
