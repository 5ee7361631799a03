"""Discrete-event simulation of a job: replicas with slots, a trainer, publications, environments, failures.

The trainer is the main line, `Simulation.run`; everything else is an event between two of its waits:

    admit ──► queue ──► slot of a replica ──► turn ends ──► environment ──► ... ──► finished ──► reward
      ▲          (all sequences of a replica grow by one token a decode step)                      │
      └── staleness bound ◄── version + 1 ◄── publish ◄── train ◄── wait for this update's groups ◄┘

When the KV pool of a replica is full, the youngest of its sequences goes back to the front of the queue and is
prefilled again where it finds room.

Between two events of a replica its number of live sequences is constant, so the seconds of k decode steps are
a closed form (a quadratic in k), and a turn costs one event rather than one for each token.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollbook.errors import PlanError, nearest_name
from rollbook.ledger.lengths import LengthDistribution, grown_by
from rollbook.ledger.quantity import require_number
from rollbook.ledger.workload import MODES, Mode

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]
"""n samples of a distribution."""


def is_colocated(mode: Mode) -> bool:
    """Engine and trainer take turns on the same GPUs."""
    return mode in ("sync", "colocate_async")


def is_async(mode: Mode) -> bool:
    """Generation of later steps goes on, or is kept, across an update."""
    return mode in ("colocate_async", "separate_async")


def constant(value: float) -> Draw:
    """Every sample is `value`."""
    return lambda rng, n: np.full(n, float(value), np.float64)


def lengths(distribution: LengthDistribution) -> Draw:
    """Response lengths of the ledger's distribution."""
    return lambda rng, n: np.asarray(distribution.quantile(rng.random(n)), np.float64)


def lognormal(mean: float, p99: float) -> Draw:
    """Log-normal with this mean and 99th percentile; constant when that is not above the mean."""
    if p99 <= mean:
        return constant(mean)
    # mean = exp(mu + s²/2) and p99 = exp(mu + 2.326 s): the smaller root is the one with the shorter tail.
    z, log_ratio = 2.326, math.log(p99 / mean)
    return lognormal_of(mean, z - math.sqrt(max(z * z - 2 * log_ratio, 0.0)))


def lognormal_of(mean: float, sigma: float) -> Draw:
    """Log-normal with this mean and standard deviation of the logarithm."""
    if sigma == 0 or mean == 0:
        return constant(mean)
    mu = math.log(mean) - sigma**2 / 2
    return lambda rng, n: rng.lognormal(mu, sigma, n)


def empirical(values: Sequence[float] | NDArray[np.float64]) -> Draw:
    """Samples with replacement from measured values."""
    held = np.asarray(values, np.float64)
    if held.size == 0:
        raise PlanError("an empirical distribution has no values", "give at least one measured value")
    return lambda rng, n: rng.choice(held, n)


@dataclass(frozen=True, slots=True)
class DecodeTable:
    """Seconds of a decode step with n live sequences: `base_s[n] + context_s[n] * context tokens`."""

    base_s: tuple[float, ...]
    """[num_slots + 1] seconds that do not depend on the context: weights, GEMMs, launches."""
    context_s: tuple[float, ...]
    """[num_slots + 1] seconds for each token of context held by the live sequences together."""

    @classmethod
    def of(
        cls, step_s: Callable[[int, float], float], *, num_slots: int, context_tokens: float
    ) -> DecodeTable:
        """Tabulate `step_s(live sequences, mean context tokens of each)` as a line up to `context_tokens`.

        Exact where the cost is affine in the context. Above 256 slots, 256 counts are asked and the rest is
        interpolated.
        """
        counts = np.unique(np.linspace(1, num_slots, min(num_slots, 256)).round().astype(int))
        base = np.array([step_s(int(n), 0.0) for n in counts])
        full = np.array([step_s(int(n), context_tokens) for n in counts])
        slope = np.maximum(full - base, 0.0) / (counts * max(context_tokens, 1.0))
        every = np.arange(num_slots + 1)
        return cls(
            tuple(np.interp(every, counts, base).tolist()), tuple(np.interp(every, counts, slope).tolist())
        )

    @property
    def num_slots(self) -> int:
        return len(self.base_s) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything the simulation needs to know. Seconds and tokens are those of one replica or one step."""

    mode: Mode
    num_replicas: int
    slots_per_replica: int
    decode: DecodeTable
    groups_per_step: int
    group_size: int
    response_tokens: Draw
    """Sampled tokens of a trajectory, over all its turns."""
    max_response_tokens: float = math.inf
    """Limit that grown responses keep to."""
    prompt_tokens: float = 0.0
    kv_pool_tokens: float = math.inf
    """Tokens of context that a replica holds; when they are used up its youngest sequence is preempted. One sequence
    goes on in any case."""
    shares_prompt: bool = True
    """Members of a group that start on one replica prefill their prompt once."""
    prefill_token_s: float = 0.0
    """Seconds a replica's decoding stands still for each token it prefills."""
    num_turns: Draw | None = None
    """Turns of a trajectory (rounded, at least 1); None: one turn."""
    env_s: Draw | None = None
    """Seconds of the environment between two turns."""
    observation_tokens: float = 0.0
    """Tokens the environment adds after each turn but the last; they are prefilled."""
    holds_slot_in_env: bool = True
    """Keep slot and KV while the environment works; else give both up and prefill the context again."""
    reward_s: Draw | None = None
    """Seconds from the last token of a trajectory to its reward, on no GPU of either side."""
    forward_s: float = 0.0
    """Trainer seconds of one step before the first update that need the whole of an update's groups."""
    train_s: float = 0.0
    """Trainer seconds of one step, all its updates together."""
    switch_s: float = 0.0
    """Colocated only: both hand-overs of a step (engine to trainer and back)."""
    gather_s: float = 0.0
    """Trainer seconds of a publication during which the engines go on."""
    sync_pause_s: float = 0.0
    """Seconds of a publication during which neither side works."""
    sync_every: int = 1
    """Updates of a step, that is between two publications. With `separate_async` each waits for its own share of
    the step's groups only; the other modes collect the whole step first."""
    max_staleness_steps: int = 0
    """Versions the trainer may be ahead of the oldest token it trains on. The sync modes ignore it (0)."""
    take: str = "admission"
    """`admission` order, or `arrival` order."""
    on_stale: str = "drop"
    """In arrival order: `drop` a finished group that is too old, or `wait` for those that would be."""
    on_publish: str = "keep"
    """Running responses at a publication: `keep` (go on under the new version), `drain` (are awaited) or
    `abort` (start over)."""
    recomputes_kv: bool = False
    """With `keep`: the context of running responses is prefilled again under the new weights."""
    trajectory_failure_frac: float = 0.0
    """Share of trajectories that end without a reward; their siblings go on."""
    replica_mtbf_s: float = math.inf
    """Mean seconds between failures of one replica; its running responses go back to the queue."""
    replica_recovery_s: float = 0.0
    keeps_tokens_of_lost_replica: bool = True
    """The router remembers sampled tokens, so that another replica prefills and continues them."""
    num_lent_replicas: int = 0
    """Replicas that idle training GPUs form while they wait; `separate_async` only."""
    lend_switch_s: float = 0.0
    """Seconds to turn training GPUs into replicas, and again back; a last wait above twice both lends them."""
    length_growth_frac: float = 0.0
    """Growth of response lengths from one step to the next."""
    num_steps: int = 10
    num_warmup_steps: int = 2
    """Steps left out of the averages."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise PlanError(f"mode is {self.mode!r}", nearest_name(self.mode, MODES))
        for name in _AT_LEAST_ONE:
            require_number(name, getattr(self, name), least=1, remedy="use at least 1")
        for name in _NOT_NEGATIVE:
            require_number(name, getattr(self, name), least=0, remedy="use zero or more")
        if not self.kv_pool_tokens >= 1:
            raise PlanError(
                f"kv_pool_tokens is {self.kv_pool_tokens}", "use at least 1, or infinity: no limit"
            )
        if not self.replica_mtbf_s > 0:
            raise PlanError(
                f"replica_mtbf_s is {self.replica_mtbf_s}", "use seconds above 0, or infinity: never"
            )
        num_sequences = self.num_steps * self.groups_per_step * self.group_size
        if num_sequences > MOST_SEQUENCES:
            raise PlanError(
                f"{self.num_steps} steps of {self.groups_per_step} x {self.group_size} trajectories are "
                f"{num_sequences:,}",
                f"simulate at most {MOST_SEQUENCES:,}: fewer steps, or a part of the groups on a part of the GPUs",
            )
        if self.slots_per_replica > self.decode.num_slots:
            raise PlanError(
                f"slots_per_replica is {self.slots_per_replica}, the decode table has {self.decode.num_slots}",
                "tabulate the decode step up to the number of slots",
            )
        if self.groups_per_step % self.sync_every:
            raise PlanError(
                f"groups_per_step {self.groups_per_step} is not a multiple of sync_every {self.sync_every}",
                "each of the updates between two publications takes the same number of groups",
            )
        if self.take not in ("admission", "arrival") or self.on_stale not in ("drop", "wait"):
            raise PlanError(
                f"take is {self.take!r} and on_stale is {self.on_stale!r}",
                "take is 'admission' or 'arrival', on_stale is 'drop' or 'wait'",
            )
        if self.on_publish not in ("keep", "drain", "abort"):
            raise PlanError(f"on_publish is {self.on_publish!r}", "use 'keep', 'drain' or 'abort'")
        if self.num_warmup_steps >= self.num_steps:
            raise PlanError(
                f"num_warmup_steps is {self.num_warmup_steps} of {self.num_steps} steps",
                "simulate more steps than are left out of the averages",
            )

    @property
    def num_collects(self) -> int:
        """Portions in which a step's groups reach the trainer."""
        return self.sync_every if self.mode == "separate_async" else 1

    @property
    def staleness_bound(self) -> int:
        return self.max_staleness_steps if is_async(self.mode) else 0


MOST_SEQUENCES = 5_000_000
"""Trajectories of one simulation: a few minutes of it."""
_AT_LEAST_ONE = (
    "num_replicas", "slots_per_replica", "groups_per_step", "group_size", "num_steps", "sync_every",
)  # fmt: skip
_NOT_NEGATIVE = (
    "prompt_tokens", "prefill_token_s", "observation_tokens", "forward_s", "train_s", "switch_s", "gather_s",
    "sync_pause_s", "replica_recovery_s", "max_staleness_steps", "num_lent_replicas", "lend_switch_s",
    "trajectory_failure_frac", "seed", "num_warmup_steps",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SimStep:
    """One step as the trainer saw it."""

    step: int
    start_s: float
    end_s: float
    wait_s: float
    """The trainer waited for groups."""
    work_s: float
    """Forward and training."""
    overhead_s: float
    """Switches, gathering, and the pause of the publication."""
    lent_s: float
    """Part of `wait_s` in which the training GPUs generated."""
    tail_s: float
    """From 90 % of the step's trajectories finished to the last one."""
    rollout_idle_frac: float
    """Share of the step in which a replica had nothing to decode or prefill, mean over replicas."""
    occupancy_frac: float
    """Live sequences over slots, mean over the replicas' time with work."""
    num_tokens: int
    """Response tokens trained on."""
    num_trajectories: int

    @property
    def step_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Interval:
    """One bar of the timeline."""

    lane: str
    """`trainer` or `replica N`."""
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """What happened. Averages leave out the warm-up steps."""

    scenario: Scenario
    steps: tuple[SimStep, ...]
    staleness: dict[int, int]
    """Trained trajectories by staleness in steps."""
    intervals: tuple[Interval, ...]
    curve_at_s: NDArray[np.float64]
    curve_live: NDArray[np.float64]
    """Live sequences over all replicas, at `curve_at_s`."""
    num_admitted: int
    num_trained: int
    num_failed: int
    num_evicted: int
    num_running: int
    """Trajectories admitted and not yet trained, failed or evicted when the simulation ended."""
    num_preemptions: int
    """Running sequences that gave up their KV because the pool was full."""
    num_events: int
    lost_tokens: int
    """Sampled tokens thrown away: aborted at a publication or lost with a replica."""
    trained_mean_tokens: float
    evicted_mean_tokens: float
    """Mean response tokens of the evicted, NaN when none was: against that of the trained, the bias."""

    def _kept(self) -> tuple[SimStep, ...]:
        return self.steps[self.scenario.num_warmup_steps :]

    def _mean(self, name: str) -> float:
        kept = self._kept()
        total_s = sum(s.step_s for s in kept)
        return sum(getattr(s, name) * s.step_s for s in kept) / total_s if total_s else 0.0

    @property
    def step_s(self) -> float:
        kept = self._kept()
        return sum(s.step_s for s in kept) / len(kept)

    @property
    def rollout_idle_frac(self) -> float:
        """Idle share of the rollout GPUs; colocated: of all GPUs, by replicas that finished early."""
        return self._mean("rollout_idle_frac")

    @property
    def occupancy_frac(self) -> float:
        return self._mean("occupancy_frac")

    @property
    def train_idle_frac(self) -> float:
        """Share of the step in which separated training GPUs have no work; colocated: 0."""
        if is_colocated(self.scenario.mode):
            return 0.0
        return 1.0 - sum(s.work_s + s.lent_s for s in self._kept()) / sum(s.step_s for s in self._kept())

    @property
    def tail_s(self) -> float:
        return sum(s.tail_s for s in self._kept()) / len(self._kept())

    @property
    def bubble_s(self) -> float:
        """Seconds of a step in which GPUs wait for a dependency: trainer separated, replicas colocated."""
        kept = self._kept()
        if is_colocated(self.scenario.mode):
            return sum(s.rollout_idle_frac * s.step_s for s in kept) / len(kept)
        return sum(s.wait_s for s in kept) / len(kept)

    @property
    def tokens_per_s(self) -> float:
        kept = self._kept()
        return sum(s.num_tokens for s in kept) / sum(s.step_s for s in kept)


class _Group:
    __slots__ = ("finished_at_s", "index", "left", "num_trained", "oldest", "replicas", "tokens", "versions")

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.left = size
        self.oldest = math.inf
        self.replicas: set[int] = set()
        self.versions: list[int] = []
        self.finished_at_s: list[float] = []
        self.tokens = 0.0
        self.num_trained = 0


class _Sequence:
    __slots__ = (
        "context", "fails", "group", "is_parked", "num_tokens", "num_turns", "order", "replica", "sampled", "turn_left",
        "turn_tokens", "turns_left", "version",
    )  # fmt: skip

    def __init__(self, order: int, group: _Group, num_tokens: float, num_turns: int, context: float) -> None:
        self.order = order
        self.group = group
        self.num_tokens = num_tokens
        self.turn_tokens = num_tokens / num_turns
        self.turn_left = self.turn_tokens
        self.num_turns = num_turns
        self.turns_left = num_turns
        self.context = context
        self.sampled = 0.0
        self.version = -1
        self.replica: _Replica | None = None
        self.fails = False
        self.is_parked = False
        """Holds slot and KV while its environment works."""


class _Replica:
    __slots__ = (
        "busy_s", "clock", "context", "free", "heap", "held_at_s", "idx", "is_down", "is_held", "num_live", "parked",
        "ready_at_s", "residents", "slot_s", "stamp", "time_s", "work_from_s",
    )  # fmt: skip

    def __init__(self, idx: int, num_slots: int) -> None:
        self.idx = idx
        self.free = num_slots
        self.time_s = 0.0
        self.clock = 0.0
        """Decode steps done since the start: a sequence that joins with k tokens left ends at clock + k."""
        self.ready_at_s = 0.0
        """Prefill keeps decoding standing until then."""
        self.num_live = 0
        self.context = 0.0
        self.parked = 0.0
        """Context held for sequences whose environment works."""
        self.heap: list[tuple[float, int, _Sequence]] = []
        self.residents: set[_Sequence] = set()
        self.stamp = 0
        self.is_held = False
        self.held_at_s = 0.0
        self.is_down = False
        self.busy_s = 0.0
        self.slot_s = 0.0
        self.work_from_s = math.nan


_TURN_ENDS, _ENV_ANSWERS, _REWARDED, _FAILS, _RECOVERS, _LENT, _POOL_FULL = range(7)
_POOL_WATERMARK = 0.99
"""A sequence is admitted while the pool is filled up to this share, so that it does not push out another at once."""


@dataclass(slots=True)
class _Totals:
    failed: int = 0
    evicted: int = 0
    evicted_groups: int = 0
    evicted_tokens: float = 0.0
    trained: int = 0
    trained_tokens: float = 0.0
    lost_tokens: float = 0.0
    preemptions: int = 0
    events: int = 0
    staleness: Counter[int] = field(default_factory=Counter)


class Simulation:
    """One run of a scenario. `run()` may be called once."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._rng = np.random.default_rng(scenario.seed)
        self._now = 0.0
        self._version = 0
        self._events: list[tuple[float, int, int, object, int]] = []
        self._num_pushed = 0
        num_replicas = scenario.num_replicas + scenario.num_lent_replicas
        self._replicas = [_Replica(i, scenario.slots_per_replica) for i in range(num_replicas)]
        self._own = self._replicas[: scenario.num_replicas]
        self._lent = self._replicas[scenario.num_replicas :]
        for replica in self._lent:
            replica.is_down = True
        self._lent_at_s = math.nan
        self._lent_from_s = 0.0
        self._lent_s = 0.0
        self._last_wait_s = 0.0
        self._queue: deque[_Sequence] = deque()
        self._is_queue_open = True
        self._num_admitted = 0
        """Groups; also the index of the next."""
        self._num_taken = 0
        self._num_sequences = 0
        self._running: dict[int, _Group] = {}
        self._finished: dict[int, _Group] = {}
        """By index, in order of arrival."""
        self._totals = _Totals()
        self._intervals: list[Interval] = []
        self._curve: list[tuple[float, int]] = []
        self._curve_stride = 1
        self._num_curve_calls = 0
        self._num_live = 0

    # -- the trainer's line ------------------------------------------------------------------------

    def run(self) -> SimResult:
        s = self.scenario
        if math.isfinite(s.replica_mtbf_s):
            for replica, after_s in zip(
                self._own, self._rng.exponential(s.replica_mtbf_s, s.num_replicas), strict=True
            ):
                self._push(float(after_s), _FAILS, replica)
        steps = [self._step(step) for step in range(s.num_steps)]
        totals, at = self._totals, np.array(self._curve or [(0.0, 0)], np.float64)
        for replica in self._replicas:
            self._close_interval(replica)
        num_admitted = self._num_admitted * s.group_size
        return SimResult(
            scenario=s,
            steps=tuple(steps),
            staleness=dict(sorted(totals.staleness.items())),
            intervals=tuple(self._intervals),
            curve_at_s=at[:, 0],
            curve_live=at[:, 1],
            num_admitted=num_admitted,
            num_trained=totals.trained,
            num_failed=totals.failed,
            num_evicted=totals.evicted,
            num_running=num_admitted - totals.trained - totals.failed - totals.evicted,
            num_preemptions=totals.preemptions,
            num_events=totals.events,
            lost_tokens=round(totals.lost_tokens),
            trained_mean_tokens=totals.trained_tokens / max(totals.trained, 1),
            evicted_mean_tokens=totals.evicted_tokens / totals.evicted if totals.evicted else math.nan,
        )

    def _step(self, step: int) -> SimStep:
        s = self.scenario
        start_s, waited_s, worked_s = self._now, 0.0, 0.0
        busy_s = sum(r.busy_s for r in self._own)
        slot_s = sum(r.slot_s for r in self._own)
        self._lent_s = 0.0
        batch: list[_Group] = []
        self._admit()
        rollout_s = 0.0
        for _ in range(s.num_collects):
            from_s = self._now
            self._lend()
            batch += self._collect(s.groups_per_step // s.num_collects)
            self._take_back()
            self._last_wait_s = self._now - from_s
            waited_s += self._now - from_s
            rollout_s += self._now - from_s
            if is_colocated(s.mode):
                self._hold()
                self._elapse(s.switch_s / 2, "switch")
            self._elapse(s.forward_s / s.num_collects, "forward")
            self._elapse(s.train_s / s.num_collects, "train")
            worked_s += (s.forward_s + s.train_s) / s.num_collects
            if is_colocated(s.mode):
                self._elapse(s.switch_s / 2, "switch")
        self._publish()
        elapsed_s = max(self._now - start_s, 1e-12)
        for replica in self._replicas:
            self._advance(replica, self._now)
        work_s = sum(r.busy_s for r in self._own) - busy_s
        slots_s = sum(r.slot_s for r in self._own) - slot_s
        # Colocated GPUs belong to the trainer outside the rollout: only the rollout's own time can be idle.
        rollout_idle_s = (rollout_s if is_colocated(s.mode) else elapsed_s) - work_s / s.num_replicas
        finished = sorted(at_s for group in batch for at_s in group.finished_at_s) or [self._now]
        return SimStep(
            step=step,
            start_s=start_s,
            end_s=self._now,
            wait_s=waited_s,
            work_s=worked_s,
            overhead_s=elapsed_s - waited_s - worked_s,
            lent_s=self._lent_s,
            tail_s=finished[-1] - finished[math.ceil(0.9 * len(finished)) - 1],
            rollout_idle_frac=max(0.0, rollout_idle_s / elapsed_s),
            occupancy_frac=slots_s / (work_s * s.slots_per_replica) if work_s > 0 else 0.0,
            num_tokens=round(sum(g.tokens for g in batch)),
            num_trajectories=sum(g.num_trained for g in batch),
        )

    def _publish(self) -> None:
        s = self.scenario
        self._elapse(s.gather_s, "gather")
        if s.on_publish == "drain" and not is_colocated(s.mode):
            self._is_queue_open = False
            from_s = self._now
            self._run_until(lambda: self._num_resident() == 0, "running responses to drain")
            self._note("trainer", "drain", from_s)
            self._is_queue_open = True
        self._hold()
        if s.on_publish == "abort":
            self._abort_running()
        self._elapse(s.sync_pause_s, "sync")
        self._version += 1
        if s.recomputes_kv:
            for replica in self._replicas:
                self._stall(replica, replica.context)
        self._release()

    def _lend(self) -> None:
        """The trainer begins to wait: after a switch its GPUs generate, when the last wait was worth it."""
        if self._lent and self._last_wait_s > 4 * self.scenario.lend_switch_s:
            self._lent_at_s = self._now + self.scenario.lend_switch_s
            self._push(self._lent_at_s, _LENT, None)

    def _take_back(self) -> None:
        """The wait is over: what ran on lent GPUs goes on elsewhere, and the switch back is paid for."""
        if math.isnan(self._lent_at_s):
            return
        was_lent, self._lent_at_s = self._now >= self._lent_at_s, math.nan
        if was_lent:
            from_s = self._now
            for replica in self._lent:
                self._withdraw(replica, keeps_tokens=True)
            self._fill_all()
            self._elapse(self.scenario.lend_switch_s, "switch")
            self._lent_s += from_s - self._lent_from_s

    def _elapse(self, seconds: float, name: str) -> None:
        """The trainer is busy with `name`; the replicas that are not held go on."""
        if seconds > 0:
            from_s, until_s = self._now, self._now + seconds
            while self._events and self._events[0][0] <= until_s:
                self._handle_next()
            self._now = until_s
            self._note("trainer", name, from_s)

    def _run_until(self, is_met: Callable[[], bool], what: str) -> None:
        while not is_met():
            if not self._events:
                raise PlanError(
                    f"the simulation waits for {what} at {self._now:.1f} s and nothing is left to happen",
                    "with arrival order and `wait`, max_staleness_steps must be at least 1",
                )
            self._handle_next()

    # -- groups ------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit every group the staleness bound allows: group g is used at step g // groups_per_step."""
        s = self.scenario
        used = self._num_admitted - self._totals.evicted_groups
        budget = (self._version + s.staleness_bound + 1) * s.groups_per_step - used
        if budget <= 0:
            return
        count = budget * s.group_size
        growth = grown_by(s.length_growth_frac, self._version)
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
        for i in range(count):
            if i % s.group_size == 0:
                group = _Group(self._num_admitted, s.group_size)
                self._running[group.index] = group
                self._num_admitted += 1
            sequence = _Sequence(self._num_sequences, group, lengths[i], turns[i], s.prompt_tokens)
            sequence.fails = fails is not None and fails[i]
            self._num_sequences += 1
            self._queue.append(sequence)
        self._fill_all()

    def _collect(self, count: int) -> list[_Group]:
        """Wait for `count` groups in the chosen order and take them."""
        s, from_s = self.scenario, self._now
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

            self._run_until(are_finished, f"groups {wanted.start} to {wanted.stop - 1}")
            taken = [self._finished.pop(i) for i in wanted]
        else:
            taken = self._collect_by_arrival(count)
        self._num_taken += count
        self._note("trainer", "wait", from_s)
        for group in taken:
            self._totals.trained += group.num_trained
            self._totals.trained_tokens += group.tokens
            self._totals.staleness.update(self._version - v for v in group.versions)
        return taken

    def _collect_by_arrival(self, count: int) -> list[_Group]:
        s = self.scenario
        oldest_allowed = self._version - s.staleness_bound
        if s.on_stale == "wait":
            # A group that started at the oldest allowed version is lost unless this step takes it.
            due = [g for g in self._running.values() if g.oldest <= oldest_allowed]
            self._run_until(lambda: all(g.left == 0 for g in due), f"{len(due)} groups about to be too stale")
        taken: list[_Group] = []
        while len(taken) < count:
            self._run_until(lambda: bool(self._finished), "a finished group")
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

    def _finish(self, sequence: _Sequence, *, has_reward: bool) -> None:
        group = sequence.group
        group.left -= 1
        if has_reward:
            group.num_trained += 1
            group.tokens += sequence.num_tokens
            group.versions.append(sequence.version)
            group.finished_at_s.append(self._now)
        else:
            self._totals.failed += 1
        if group.left == 0:
            del self._running[group.index]
            self._finished[group.index] = group

    # -- replicas ----------------------------------------------------------------------------------

    def _num_resident(self) -> int:
        return sum(len(r.residents) for r in self._replicas)

    def _fill_all(self) -> None:
        """Queue to slots, a group at a time onto the emptiest replica: its members share one prefill."""
        if not (self._queue and self._is_queue_open):
            return
        open_replicas = [(-r.free, r.idx) for r in self._replicas if r.free and not r.is_down]
        heapq.heapify(open_replicas)
        touched: set[int] = set()
        while self._queue and open_replicas:
            replica = self._replicas[heapq.heappop(open_replicas)[1]]
            if not self._has_room(replica, self._queue[0]):
                continue  # it takes none now; the next emptiest may
            if replica.idx not in touched:
                self._advance(replica, self._now)
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
            self._schedule(self._replicas[idx])

    def _has_room(self, replica: _Replica, sequence: _Sequence) -> bool:
        """Whether the pool of `replica` takes the context of `sequence`."""
        held = replica.context + replica.parked + sequence.context
        return replica.num_live == 0 or held <= _POOL_WATERMARK * self.scenario.kv_pool_tokens

    def _preempt(self, replica: _Replica) -> None:
        """The youngest sequence gives up slot and KV, and waits at the front of the queue with its tokens."""
        self._advance(replica, self._now)
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
            self._totals.preemptions += 1
        self._schedule(replica)
        self._fill_all()

    def _place(self, sequence: _Sequence, replica: _Replica) -> None:
        """Give `sequence` a slot on `replica`, which stands at now, and prefill what it does not hold."""
        group = sequence.group
        if sequence.version < 0:
            sequence.version = self._version
        group.oldest = min(group.oldest, sequence.version)
        fresh = sequence.context
        if self.scenario.shares_prompt and sequence.sampled == 0 and replica.idx in group.replicas:
            fresh = 0.0  # a sibling brought the prompt
        group.replicas.add(replica.idx)
        replica.free -= 1
        replica.residents.add(sequence)
        sequence.replica = replica
        self._join(sequence, replica, fresh)

    def _join(self, sequence: _Sequence, replica: _Replica, prefill_tokens: float) -> None:
        """`sequence` takes part in the next decode steps until its turn ends."""
        self._stall(replica, prefill_tokens)
        if replica.num_live == 0:
            replica.context = 0.0
            replica.work_from_s = self._now
        replica.num_live += 1
        self._num_live += 1
        replica.context += sequence.context
        heapq.heappush(replica.heap, (replica.clock + sequence.turn_left, sequence.order, sequence))

    def _stall(self, replica: _Replica, prefill_tokens: float) -> None:
        """Decoding on `replica` stands while it prefills, after what it has to prefill already."""
        from_s = max(replica.ready_at_s, replica.held_at_s if replica.is_held else self._now)
        replica.ready_at_s = from_s + prefill_tokens * self.scenario.prefill_token_s

    def _leave(self, sequence: _Sequence, replica: _Replica, num_sampled: float) -> None:
        """`sequence` stops decoding; what it sampled is part of its context now."""
        sequence.context += num_sampled
        sequence.sampled += num_sampled
        sequence.turn_left -= num_sampled
        replica.num_live -= 1
        self._num_live -= 1
        replica.context -= sequence.context
        if replica.num_live == 0:
            self._close_interval(replica)

    def _seconds(self, replica: _Replica, num_steps: float) -> float:
        """Seconds of `num_steps` decode steps; the context of each live sequence grows by one a step."""
        n, table = replica.num_live, self.scenario.decode
        return num_steps * (table.base_s[n] + table.context_s[n] * (replica.context + n * num_steps / 2))

    def _steps_in(self, replica: _Replica, seconds: float) -> float:
        """The inverse of `_seconds`."""
        n, table = replica.num_live, self.scenario.decode
        a = table.context_s[n] * n / 2
        b = table.base_s[n] + table.context_s[n] * replica.context
        if a * seconds < 1e-9 * b * b:
            return seconds / b if b > 0 else replica.heap[0][0] - replica.clock
        return (math.sqrt(b * b + 4 * a * seconds) - b) / (2 * a)

    def _advance(self, replica: _Replica, to_s: float) -> None:
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

    def _schedule(self, replica: _Replica) -> None:
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

    def _hold(self) -> None:
        for replica in self._replicas:
            if not replica.is_held:
                self._advance(replica, self._now)
                replica.is_held = True
                replica.held_at_s = self._now
                replica.stamp += 1
                if replica.num_live:
                    self._close_interval(replica)

    def _release(self) -> None:
        for replica in self._replicas:
            replica.is_held = False
            replica.time_s = self._now
            if replica.ready_at_s > replica.held_at_s:  # prefill that was left, or came up, during the pause
                replica.ready_at_s += self._now - replica.held_at_s
            if replica.num_live:
                replica.work_from_s = self._now
            self._schedule(replica)
        self._fill_all()

    def _abort_running(self) -> None:
        """Running responses go back to the front of the queue and start over under the next version."""
        for replica in self._replicas:
            for sequence in self._evacuate(replica, keeps_tokens=False):
                sequence.version = -1
                self._queue.appendleft(sequence)

    def _evacuate(self, replica: _Replica, *, keeps_tokens: bool) -> list[_Sequence]:
        """Take every live sequence off `replica`, youngest first."""
        live = sorted(((end, s) for end, _, s in replica.heap), key=lambda pair: -pair[1].order)
        for end, sequence in live:
            self._leave(sequence, replica, sequence.turn_left - (end - replica.clock))
            if not keeps_tokens:
                self._totals.lost_tokens += sequence.sampled
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
            assert isinstance(subject, _Replica)
            if subject.stamp == stamp:
                self._now = at_s
                self._end_turns(subject) if kind == _TURN_ENDS else self._preempt(subject)
            return
        self._now = at_s
        self._totals.events += 1
        if kind == _ENV_ANSWERS:
            assert isinstance(subject, _Sequence)
            self._continue(subject)
        elif kind == _REWARDED:
            assert isinstance(subject, _Sequence)
            self._finish(subject, has_reward=True)
        elif kind == _FAILS:
            assert isinstance(subject, _Replica)
            self._fail(subject)
        elif kind == _LENT:
            if at_s == self._lent_at_s:
                self._lent_from_s = at_s
                for replica in self._lent:
                    replica.is_down = False
                    replica.time_s = at_s
                self._fill_all()
        else:
            assert isinstance(subject, _Replica)
            subject.is_down = False
            subject.time_s = self._now
            self._push(
                self._now + float(self._rng.exponential(self.scenario.replica_mtbf_s)), _FAILS, subject
            )
            self._fill_all()

    def _end_turns(self, replica: _Replica) -> None:
        """Every sequence whose turn ends at this decode step leaves, and its slot goes to the queue."""
        s = self.scenario
        busy_s = self._now - replica.time_s
        replica.busy_s += busy_s
        replica.slot_s += replica.num_live * busy_s
        end = replica.heap[0][0]
        replica.context += (end - replica.clock) * replica.num_live
        replica.clock, replica.time_s = end, self._now
        while replica.heap and replica.heap[0][0] <= end + 1e-9:
            sequence = heapq.heappop(replica.heap)[2]
            self._totals.events += 1
            self._leave(sequence, replica, sequence.turn_left)
            sequence.turns_left -= 1
            if sequence.turns_left and not sequence.fails:
                wait_s = float(s.env_s(self._rng, 1)[0]) if s.env_s is not None else 0.0
                if s.holds_slot_in_env:
                    sequence.is_parked = True
                    replica.parked += sequence.context
                else:
                    self._free(sequence, replica)
                self._push(self._now + wait_s, _ENV_ANSWERS, sequence)
                continue
            self._free(sequence, replica)
            if sequence.fails or s.reward_s is None:
                self._finish(sequence, has_reward=not sequence.fails)
            else:
                self._push(self._now + float(s.reward_s(self._rng, 1)[0]), _REWARDED, sequence)
        if self._is_queue_open and not replica.is_down:
            while self._queue and replica.free and self._has_room(replica, self._queue[0]):
                self._place(self._queue.popleft(), replica)
        self._note_live()
        self._schedule(replica)

    def _free(self, sequence: _Sequence, replica: _Replica) -> None:
        replica.free += 1
        replica.residents.discard(sequence)
        self._unpark(sequence, replica)
        sequence.replica = None

    def _unpark(self, sequence: _Sequence, replica: _Replica) -> None:
        if sequence.is_parked:
            sequence.is_parked = False
            replica.parked -= sequence.context

    def _continue(self, sequence: _Sequence) -> None:
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
        self._advance(replica, self._now)
        self._join(sequence, replica, observed)
        self._schedule(replica)

    def _fail(self, replica: _Replica) -> None:
        """The replica dies: live sequences go to the front of the queue, those in an environment lose it."""
        s = self.scenario
        self._withdraw(replica, keeps_tokens=s.keeps_tokens_of_lost_replica)
        self._push(self._now + s.replica_recovery_s, _RECOVERS, replica)
        self._fill_all()

    def _withdraw(self, replica: _Replica, *, keeps_tokens: bool) -> None:
        """Take `replica` out of service; what it ran goes to the front of the queue."""
        self._advance(replica, self._now)
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
            self._curve.append((self._now, self._num_live))
            if len(self._curve) >= 40_000:
                self._curve = self._curve[::2]
                self._curve_stride *= 2

    def _note(self, lane: str, name: str, from_s: float) -> None:
        if self._now > from_s:
            self._intervals.append(Interval(lane, name, from_s, self._now))

    def _close_interval(self, replica: _Replica) -> None:
        if replica.work_from_s < self._now:
            self._intervals.append(
                Interval(f"replica {replica.idx}", "decode", replica.work_from_s, self._now)
            )
        replica.work_from_s = math.nan


def simulate(scenario: Scenario) -> SimResult:
    """Run `scenario` from an empty engine.

    Raises:
        PlanError: the scenario waits for something that can never happen.

    >>> table = DecodeTable.of(lambda n, context: 0.01, num_slots=4, context_tokens=0)
    >>> result = simulate(Scenario(mode="sync", num_replicas=2, slots_per_replica=4, decode=table,
    ...     groups_per_step=4, group_size=4, response_tokens=constant(100), train_s=3.0, num_steps=3))
    >>> round(result.step_s, 6)  # 16 sequences in 8 slots: two waves of 100 steps of 10 ms, then training
    5.0
    """
    return Simulation(scenario).run()
