"""Discrete-event simulation of a job: replicas with slots, a trainer, publications, environments, failures.

    sim_draws      distributions of lengths and seconds
    sim_scenario   everything that the simulation needs to know
    sim_parts      groups, sequences, replicas
    sim_engines    queue, slots and events
    simulate       the trainer's line, below: it admits, waits, trains and publishes
    sim_result     steps, timeline and averages

The trainer is the main line, `Simulation.run`; everything else is an event between two of its waits:

    admit ──► queue ──► slot of a replica ──► turn ends ──► environment ──► ... ──► finished ──► reward
      ▲                                                                                            │
      └── staleness bound ◄── version + 1 ◄── publish ◄── train ◄── wait for this update's groups ◄┘
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from rollbook.ledger.lengths import grown_by
from rollbook.ledger.step import is_colocated
from rollbook.observe.numbers import counted
from rollbook.planner.sim_engines import Engines
from rollbook.planner.sim_parts import SimGroup, SimSequence
from rollbook.planner.sim_result import SimResult, SimStep
from rollbook.planner.sim_scenario import Scenario


@dataclass(slots=True)
class _Totals:
    failed: int = 0
    evicted: int = 0
    evicted_groups: int = 0
    evicted_tokens: float = 0.0
    trained: int = 0
    trained_tokens: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)


class Simulation:
    """One run of a scenario. `run()` may be called once."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._rng = np.random.default_rng(scenario.seed)
        self._engines = Engines(scenario, self._rng, self._finish)
        self._last_wait_s = 0.0
        self._num_admitted = 0
        """Groups; also the index of the next."""
        self._num_taken = 0
        self._num_sequences = 0
        self._running: dict[int, SimGroup] = {}
        self._finished: dict[int, SimGroup] = {}
        """By index, in order of arrival."""
        self._totals = _Totals()

    def run(self) -> SimResult:
        s, engines, totals = self.scenario, self._engines, self._totals
        steps = [self._step(step) for step in range(s.num_steps)]
        at = np.array(engines.curve or [(0.0, 0)], np.float64)
        engines.close()
        num_admitted = self._num_admitted * s.group_size
        return SimResult(
            scenario=s,
            steps=tuple(steps),
            staleness=dict(sorted(totals.staleness.items())),
            intervals=tuple(engines.intervals),
            curve_at_s=at[:, 0],
            curve_live=at[:, 1],
            num_admitted=num_admitted,
            num_trained=totals.trained,
            num_failed=totals.failed,
            num_evicted=totals.evicted,
            num_running=num_admitted - totals.trained - totals.failed - totals.evicted,
            num_preemptions=engines.num_preemptions,
            num_events=engines.num_events,
            lost_tokens=round(engines.lost_tokens),
            trained_mean_tokens=totals.trained_tokens / max(totals.trained, 1),
            evicted_mean_tokens=totals.evicted_tokens / totals.evicted if totals.evicted else math.nan,
        )

    def _step(self, step: int) -> SimStep:
        s, engines = self.scenario, self._engines
        start_s, waited_s, worked_s, lent_s = engines.now_s, 0.0, 0.0, 0.0
        busy_s, slot_s = engines.seconds_used()
        batch: list[SimGroup] = []
        self._admit()
        for _ in range(s.num_collects):
            from_s = engines.now_s
            if self._last_wait_s > 4 * s.lend_switch_s:
                engines.lend()
            batch += self._collect(s.groups_per_step // s.num_collects)
            lent_s += engines.take_back()
            self._last_wait_s = engines.now_s - from_s
            waited_s += engines.now_s - from_s
            if is_colocated(s.mode):
                engines.hold()
                engines.elapse(s.switch_s / 2, "switch")
            engines.elapse(s.forward_s / s.num_collects, "forward")
            engines.elapse(s.train_s / s.num_collects, "train")
            worked_s += (s.forward_s + s.train_s) / s.num_collects
            if is_colocated(s.mode):
                engines.elapse(s.switch_s / 2, "switch")
        self._publish()
        elapsed_s = max(engines.now_s - start_s, 1e-12)
        busy_until_s, slot_until_s = engines.seconds_used()
        decode_s, slots_s = busy_until_s - busy_s, slot_until_s - slot_s
        generate_s = decode_s / s.num_replicas
        rollout_busy_s, train_busy_s = generate_s * s.rollout_used_frac, worked_s + lent_s
        if is_colocated(s.mode):
            rollout_busy_s = train_busy_s = rollout_busy_s + worked_s
        finished = sorted(at_s for group in batch for at_s in group.finished_at_s) or [engines.now_s]
        return SimStep(
            step=step,
            start_s=start_s,
            end_s=engines.now_s,
            wait_s=waited_s,
            work_s=worked_s,
            overhead_s=elapsed_s - waited_s - worked_s,
            lent_s=lent_s,
            tail_s=finished[-1] - finished[math.ceil(0.9 * len(finished)) - 1],
            bubble_s=max(waited_s - generate_s, 0.0) if is_colocated(s.mode) else waited_s,
            rollout_idle_frac=max(1 - rollout_busy_s / elapsed_s, 0.0),
            train_idle_frac=max(1 - train_busy_s / elapsed_s, 0.0),
            occupancy_frac=slots_s / (decode_s * s.slots_per_replica) if decode_s > 0 else 0.0,
            num_tokens=round(sum(g.tokens for g in batch)),
            num_trajectories=sum(g.num_trained for g in batch),
        )

    def _publish(self) -> None:
        s, engines = self.scenario, self._engines
        engines.elapse(s.gather_s, "gather")
        if s.on_publish == "drain" and not is_colocated(s.mode):
            engines.drain()
        engines.hold()
        if s.on_publish == "abort":
            engines.abort_running()
        engines.elapse(s.sync_pause_s, "sync")
        engines.version += 1
        if s.recomputes_kv:
            engines.recompute_kv()
        engines.release()

    # -- groups ------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit every group the staleness bound allows: group g is used at step g // groups_per_step."""
        s = self.scenario
        used = self._num_admitted - self._totals.evicted_groups
        budget = (self._engines.version + s.staleness_bound + 1) * s.groups_per_step - used
        if budget <= 0:
            return
        count = budget * s.group_size
        growth = grown_by(s.length_growth_frac, self._engines.version)
        drawn = s.response_tokens(self._rng, count) * growth
        lengths = np.clip(drawn, 1.0, s.max_response_tokens).tolist()
        turns = [1] * count
        if s.num_turns is not None:
            turns = np.maximum(s.num_turns(self._rng, count).round(), 1).astype(int).tolist()
        fails = (
            (self._rng.random(count) < s.trajectory_failure_frac).tolist()
            if s.trajectory_failure_frac
            else None
        )
        admitted: list[SimSequence] = []
        for i in range(count):
            if i % s.group_size == 0:
                group = SimGroup(self._num_admitted, s.group_size)
                self._running[group.index] = group
                self._num_admitted += 1
            sequence = SimSequence(self._num_sequences, group, lengths[i], turns[i], s.prompt_tokens)
            sequence.fails = fails is not None and fails[i]
            self._num_sequences += 1
            admitted.append(sequence)
        self._engines.queue(admitted)

    def _collect(self, count: int) -> list[SimGroup]:
        """Wait for `count` groups in the chosen order and take them."""
        s, from_s = self.scenario, self._engines.now_s
        if s.take == "admission":
            wanted = range(self._num_taken, self._num_taken + count)
            missing = {i for i in wanted if i not in self._finished}
            finished = self._finished

            def are_finished() -> bool:
                while missing:
                    index = next(iter(missing))
                    if index not in finished:
                        return False
                    missing.discard(index)
                return True

            self._engines.run_until(are_finished, f"groups {wanted.start} to {wanted.stop - 1}")
            taken = [self._finished.pop(i) for i in wanted]
        else:
            taken = self._collect_by_arrival(count)
        self._num_taken += count
        self._engines.note("trainer", "wait", from_s)
        for group in taken:
            self._totals.trained += group.num_trained
            self._totals.trained_tokens += group.tokens
            self._totals.staleness.update(self._engines.version - v for v in group.versions)
        return taken

    def _collect_by_arrival(self, count: int) -> list[SimGroup]:
        s = self.scenario
        oldest_allowed = self._engines.version - s.staleness_bound
        if s.on_stale == "wait":
            # A group that started at the oldest allowed version is lost unless this step takes it.
            due = [g for g in self._running.values() if g.oldest <= oldest_allowed]
            self._engines.run_until(
                lambda: all(g.left == 0 for g in due), f"{counted(len(due), 'group')} about to be too stale"
            )
        taken: list[SimGroup] = []
        while len(taken) < count:
            self._engines.run_until(lambda: bool(self._finished), "a finished group")
            by_need = (
                sorted(self._finished, key=lambda i: self._finished[i].oldest)
                if s.on_stale == "wait"
                else None
            )
            group = self._finished.pop(by_need[0] if by_need else next(iter(self._finished)))
            if group.oldest < oldest_allowed:
                self._totals.evicted += group.num_trained
                self._totals.evicted_groups += 1
                self._totals.evicted_tokens += group.tokens
                self._admit()
            else:
                taken.append(group)
        return taken

    def _finish(self, sequence: SimSequence, has_reward: bool) -> None:
        group = sequence.group
        group.left -= 1
        if has_reward:
            group.num_trained += 1
            group.tokens += sequence.num_tokens
            group.versions.append(sequence.version)
            group.finished_at_s.append(self._engines.now_s)
        else:
            self._totals.failed += 1
        if group.left == 0:
            del self._running[group.index]
            self._finished[group.index] = group


def simulate(scenario: Scenario) -> SimResult:
    """Run `scenario` from an empty engine.

    Raises:
        PlanError: the scenario waits for something that can never happen.

    >>> from rollbook.planner.sim_draws import constant
    >>> from rollbook.planner.sim_scenario import DecodeTable
    >>> table = DecodeTable.of(lambda n, context: 0.01, num_slots=4, context_tokens=0)
    >>> result = simulate(Scenario(mode="sync", num_replicas=2, slots_per_replica=4, decode=table,
    ...     groups_per_step=4, group_size=4, response_tokens=constant(100), train_s=3.0, num_steps=3))
    >>> round(result.step_s, 6)  # 16 sequences in 8 slots: two waves of 100 steps of 10 ms, then training
    5.0
    """
    return Simulation(scenario).run()
