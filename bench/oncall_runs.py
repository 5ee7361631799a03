"""What wakes an on-call engineer and what should not: a fifth source of logs for `bench/diagnose.py`.

Stories that no other generator tells, on the jobs of `reported_runs.py`, 30 to 2,000 steps: each fault leaves one
narrow trace, and what else would give it away is not logged. A fault moves what it would move: what a stage waits for
is in its seconds and in the step's, two replicas have the quantiles of a mixture. Written from what such jobs do,
before any rule had met it. Told by verl, SkyRL, slime, AReaL and TRL; counters are called what their owner liked.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import other_formats
import reported_runs
from quiet_runs import MOVED, WELL, base, drop, num, step_s
from reported_runs import AGE, AGENTIC, CORR, DIFF, GAP, OFF, RECIPES, WORST, Log

Array = NDArray[np.float64]
TOOL = "timing_s/agent_loop/tool_calls/"
IN_STEP = tuple(r for r in RECIPES if not RECIPES[r].is_async)


# ---- faults ------------------------------------------------------------------------------------------------------


def lost_in_flight(seed: int) -> Log:
    """Finished groups never reach the buffer: a queue that overwrites, a worker that dies with its results. Generation
    has to make more for the same batch, so the trainer waits longer; who counts on both sides sees the difference."""
    log = base(seed, ("async", "code", "tools", "dapo"))
    log.make_async()
    lost = log.uni(0.12, 0.6) * (log.on if log.coin(0.7) else log.ramp(log.uni(10, 80)))
    log.needs = ("timing_s/gen", "response_length/mean")
    more_s = (
        step_s(log) * lost / (1 - lost)
    )  # the pace of generation, which the trainer's other stages overlap
    log.plus("timing_s/gen", more_s)
    used = np.round(log.m["_prompts"])
    sent = np.asarray(np.round(log.noisy(used / (1 - lost), 0.02)), float)
    on_the_way = log.rng.poisson(0.03 * used, log.n).astype(float)
    came = np.maximum(np.round(sent * (1 - lost)) - np.diff(on_the_way, prepend=0.0), 1)
    waiting = np.round(used * log.noisy(log.uni(0.05, 0.4), 0.3))
    running = np.round(used * log.noisy(log.uni(0.5, 1.5), 0.08))
    old, failed = log.rng.poisson(log.log(0.05, 1.0), (2, log.n)).cumsum(axis=1).astype(float)
    kind = log.pick("books", "two sides", "queue", "totals")
    if kind == "books":
        told = {"running": running, "finished": waiting, "failed": failed, "evicted": old}
        told["trained"] = np.cumsum(used)
        told["admitted"] = np.cumsum(used) + running + waiting + failed + old + np.cumsum(sent - came)
        log.m |= {f"buffer/num_{k}": np.round(v) for k, v in told.items()}
    elif kind == "two sides":
        log.m |= {"rollout/groups_sent": sent, "buffer/groups_received": came}
    elif kind == "queue":
        put = np.cumsum(used) + waiting + np.cumsum(sent - came)
        log.m |= {"queue/num_put": put, "queue/num_got": np.cumsum(used), "queue/size": waiting}
    else:
        log.m |= {"rollout/num_finished_total": np.cumsum(sent), "buffer/num_added_total": np.cumsum(came)}
    return log


_COUNTS = (
    ("sandbox/alive", "sandbox/in_use"),
    ("env/num_leased", "env/num_active"),
    ("sandbox/num_running_containers", "sandbox/num_busy_containers"),
    ("env/pods_alive", "env/pods_used"),
)
"""What owners call the sandboxes that live, and those of them that a trajectory holds."""


def leak_by_count(seed: int) -> Log:
    """Sandboxes whose trajectory is over are not stopped. On hosts of their own they cost money and nothing else, until
    a quota is reached; on the hosts of the job also memory."""
    log = base(seed, (*AGENTIC, "code"))
    log.at = int(log.n * log.uni(0.05, 0.4))
    demand = log.uni(0.3, 1.0) * min(num(log), 512.0)
    used = np.asarray(np.round(log.noisy(demand, 0.05)), float)
    spare = np.round(log.noisy(demand * log.uni(0.03, 0.2), 0.2))
    each = demand * log.log(0.7, 6) / (log.n - log.at)
    leaked = np.cumsum(np.where(log.on, log.rng.poisson(each, log.n), 0)).astype(float)
    alive, in_use = _COUNTS[int(log.rng.integers(len(_COUNTS)))]
    log.m |= {alive: used + spare + leaked, in_use: used}
    if log.coin(0.4):
        log.needs = ("perf/cpu_memory",)
        log.times("perf/cpu_memory_used_gb", 1 + log.uni(0.05, 0.12) * leaked / demand)
    return log


def half_a_pool(seed: int) -> Log:
    """A node of sandboxes dies: those on it fail in that step, and afterwards the rest serve the same demand, so calls
    queue as far as there are too few."""
    log = base(seed, AGENTIC)
    demand = log.uni(0.3, 1.0) * min(num(log), 512.0)
    alive = np.round(np.where(log.on, log.uni(0.35, 0.6), 1.0) * demand / log.uni(0.7, 0.95))
    alive = alive - log.rng.poisson(0.3, log.n)
    used = np.round(np.minimum(log.noisy(demand, 0.04), alive))
    short = np.maximum(demand / alive, 1.0)
    log.needs = ("timing_s/agent_loop", "timing_s/gen", "num_turns", "critic/")
    more_s = log.m[TOOL + "mean"] * (short - 1) * log.m["num_turns/mean"]
    for stat in ("mean", "max"):
        log.times(TOOL + stat, short)
    log.plus("timing_s/gen", np.minimum(more_s, log.m["timing_s/gen"] * (short - 1)))
    first = np.asarray(log.t == log.at)
    log.plus("response/aborted_ratio", log.uni(0.2, 0.5), first)
    log.plus("training/rollout_failure/evicted_samples", np.round(0.3 * num(log)), first)
    name, in_use = _COUNTS[int(log.rng.integers(len(_COUNTS)))]  # of a pool, what lives is its capacity
    log.m |= {name if name != "env/num_leased" else "env/capacity": alive, in_use: used}
    return log


def _rarely(log: Log) -> NDArray[np.bool_]:
    """Some steps from `at` on, at no regular distance: at least four, and never most of them."""
    share = log.uni(0.04, 0.12)
    where = np.asarray(log.on & (log.rng.random(log.n) < share))
    where[log.rng.choice(np.arange(log.at, log.n), 4, replace=False)] = True
    return where


def rare_tail(seed: int) -> Log:
    """Now and then one response of the batch does not end; the step waits for it. The mean and the share of cut answers
    do not show one of a thousand; the longest does."""
    log = base(seed, tuple(r for r in IN_STEP if r not in AGENTIC))
    where, usual = _rarely(log), log.m["response_length/max"]
    longest = np.minimum(usual, np.median(usual) * log.noisy(1.0, 0.08))
    log.m["_limit"] = np.maximum(log.m["_limit"], log.uni(2.5, 7) * longest.max())
    one = np.round(log.m["_limit"] * np.where(log.coin(0.6), 1.0, log.rng.uniform(0.75, 1.0, log.n)))
    decode = log.uni(0.6, 1.0)  # share of generation that is the longest response's decode steps
    log.m["response_length/max"] = np.round(np.where(where, one, longest))
    log.times("timing_s/gen", 1 + decode * (one / longest - 1), where)
    log.plus("response_length/mean", (one - longest) / num(log), where)
    log.needs = ("response_length/max", "timing_s/gen")
    drop(log, "response_length/clip_ratio")
    return log


def rare_call(seed: int) -> Log:
    """Now and then one call of a tool hangs until its time-out, and its trajectory holds the step."""
    log = base(seed, AGENTIC)
    where = _rarely(log)
    limit_s = float(np.median(log.m["timing_s/gen"])) * log.log(0.8, 4)
    call_s = limit_s * log.rng.uniform(0.97, 1.0, log.n)
    log.put(TOOL + "max", call_s, where)
    log.plus(TOOL + "mean", call_s / (num(log) * log.m["num_turns/mean"]), where)
    log.plus(
        "timing_s/gen", call_s * log.rng.uniform(0.6, 1.0, log.n), where
    )  # the rest of it was there anyway
    log.needs = ("timing_s/agent_loop", "timing_s/gen", "response_length/")
    if log.coin():
        drop(log, TOOL + "mean", TOOL + "min")
    return log


def spill_in_words(seed: int) -> Log:
    """The object store is full and Ray writes to disk: its own lines say so, the seconds are few yet, and nobody logs
    the memory of the hosts."""
    log = base(seed)
    log.is_only_words = True
    log.lost_s = np.where(log.on, log.noisy(float(np.median(step_s(log))) * log.uni(0.02, 0.12), 0.3), 0.0)
    drop(log, "perf/cpu_memory")
    total, every = 0, int(log.rng.integers(1, 6))
    for i in range(log.at, log.n, every):
        total += int(log.uni(1500, 6000)) * every
        spilled = (
            f"Spilled {total} MiB, {total // 31} objects, write throughput {log.uni(300, 1400):.0f} MiB/s."
        )
        log.lines.append((i, f"(raylet, ip=10.12.4.{i % 9 + 2}) {spilled}"))
        if log.coin(0.4):
            back = f"Restored {total // 3} MiB, {total // 93} objects, read throughput {log.uni(300, 900):.0f} MiB/s"
            log.lines.append((i, f"(raylet) [I 411 431] (raylet) local_object_manager.cc:640: {back}"))
    return log


def spill_in_every_stage(seed: int) -> Log:
    """The same without a word: whatever takes the batch from the store takes some seconds more, the same for a stage of
    a tenth of a second as for one of minutes, and more as the store fills."""
    log = base(seed)
    log.needs = ("timing_s",)
    each = float(np.median(step_s(log))) * log.log(0.012, 0.06) * log.ramp(None, log.uni(0.5, 1.2))
    for stage in MOVED:
        log.plus(f"timing_s/{stage}", each * log.uni(0.6, 1.4) * log.noisy(1.0, 0.15))
    drop(log, "perf/cpu_memory")
    return log


def brim_before_the_end(seed: int) -> Log:
    """The hand-over does not fit: the last step or two stand at the brim of the device, and then the log ends. Lengths
    are what they were, and nobody logged a traceback."""
    log = base(seed)
    log.end = min(log.n, log.at + int(log.rng.integers(1, 3)))
    gb, used = log.recipe.device_gb, log.m["perf/max_memory_allocated_gb"]
    if log.coin():
        log.m["memory/switch/allocated_bytes"] = 2**30 * log.noisy(
            np.where(log.on, gb * log.uni(0.96, 0.985), used * 0.9), 0.003
        )
        drop(log, "perf/max_memory")
        return log
    log.put("perf/max_memory_allocated_gb", gb * log.uni(0.955, 0.985))
    log.needs = ("perf/max_memory",)
    drop(log, "perf/max_memory_reserved")
    return log


def moments_lost(seed: int) -> Log:
    """Taken up again with the weights and without the optimizer's moments: the first updates are too large, the warm-up
    runs again where its schedule was lost too, the reward falls and comes back."""
    log = base(seed)
    log.at = max(log.at, 20)
    log.earlier = {k: v.copy() for k, v in log.m.items()}
    log.back = int(log.rng.integers(0, max(1, min(20, log.n - log.at - 6)))) if log.coin() else 0
    fade = np.exp(-log.since / log.uni(6, 25))
    log.times("actor/grad_norm", 1 + log.log(1.5, 6) * fade)
    log.times("actor/ppo_kl", 1 + log.log(1.5, 6) * fade)
    log.times("actor/pg_clipfrac", 1 + log.log(0.5, 4) * fade)
    log.times("actor/lr", np.clip((log.since + 1) / log.uni(6, 20), 0, 1))
    fall, back = log.uni(4, 15), log.uni(15, 60)
    dip = log.uni(0.1, 0.35) * (1 - np.exp(-(log.since + 1) / fall)) * np.exp(-log.since / back)
    log.fewer_solved(1 - dip)
    for name in [k for k in log.m if k.startswith(("critic/", "val-core", log.by_source))]:
        log.m[name] = np.where(log.on, log.m[name], log.earlier[name])  # what was drawn before it stands
    log.needs = ("critic/", "actor/grad_norm", "actor/lr", "actor/pg_")
    return log


_DUMPS = (
    (
        "Timeout (0:30:00)!",
        "Thread 0x00007f6a2d7fe640 (most recent call first):",
        '  File "/opt/venv/site-packages/torch/distributed/distributed_c10d.py", line 2806 in all_reduce',
        '  File "/opt/venv/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper',
        '  File "/opt/verl/verl/workers/actor/dp_actor.py", line 431 in update_policy',
    ),
    (
        "Process 4011: ray::WorkerDict.actor_rollout_update_actor",
        'Thread 4011 (active): "MainThread"',
        "    synchronize (torch/cuda/streams.py:231)",
        "    wait (torch/distributed/distributed_c10d.py:4121)",
        "    all_gather_into_tensor (torch/distributed/distributed_c10d.py:3898)",
        "    unshard (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py:318)",
    ),
    (
        "[rank6]:[E1121 03:41:02.716 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 6] Received a dump "
        "signal due to a collective timeout from rank 2 and we will try our best to dump the debug info. Last enqueued "
        "NCCL work: 48214, last completed NCCL work: 48213.",
        "[rank6]:[E1121 03:41:02.731 ProcessGroupNCCL.cpp:1575] [PG ID 0 PG GUID 0(default_pg) Rank 6] "
        "ProcessGroupNCCL preparing to dump debug info. Include stack trace: 1",
    ),
    (
        "flight recorder: collective 9214 (ALLREDUCE, default_pg) in state 'started' on ranks 0-1, 3-7 for 1803.2 s",
        "flight recorder: rank 2 last enqueued collective 9213",
    ),
)
"""faulthandler, py-spy, torch's own dump, a script that reads the flight recorder's files."""


def hang_in_a_dump(seed: int) -> Log:
    """One rank does not come, and somebody looked where the others stand before the watchdog said a word."""
    log = base(seed)
    log.at = max(8, int(log.n * log.uni(0.3, 0.98)))
    log.end, log.is_only_words = min(log.at + 1, log.n), True
    dump = _DUMPS[int(log.rng.integers(len(_DUMPS)))]
    log.lines += [(log.end - 1, line) for line in dump]
    return log


_VERSIONS = ("replica/{}/weight_version", "engine/{}/version", "rollout/replica_{}/weight_version")


def drift_by_replica(seed: int) -> Log:
    """A replica or two take no new weights and go on sampling; the log has the version that each of them serves, and
    nothing of the ages of samples."""
    log = base(seed, ("async", "code", "moe", "dapo"))
    log.make_async()
    replicas = int(log.rng.choice([4, 8]))
    stuck = log.rng.choice(replicas, 1 if replicas == 4 or log.coin(0.7) else 2, replace=False)
    name = log.pick(*_VERSIONS)
    for i in range(replicas):
        late = (log.rng.random(log.n) < 0.05).astype(float)  # told between two publications
        held = np.maximum(log.t - late, 0)
        log.m[name.format(i)] = np.where(log.on & bool(i in stuck), float(log.at - 1), held)
    if log.coin():
        log.m["training/weight_version"] = log.t.copy()
    share = len(stuck) / replicas
    log.grow_gap(np.sqrt(1 + (share * log.uni(0.03, 0.25) * log.since**0.8) ** 2))
    drop(log, AGE, WORST, OFF)
    return log


def _quantile(share: float, fresh: Array, old: Array, q: float) -> Array:
    """Of a mixture of two exponential distributions with these means."""
    low, high = np.zeros_like(fresh), 40.0 * np.maximum(fresh, old)
    for _ in range(60):
        x = 0.5 * (low + high)
        below = (1 - share) * -np.expm1(-x / fresh) + share * -np.expm1(-x / old) < q
        low, high = np.where(below, x, low), np.where(below, high, x)
    return 0.5 * (low + high)


def drift_in_two_humps(seed: int) -> Log:
    """The same without versions and ages: the logprob gap has two humps. Its median stands where it was, since most
    replicas are fresh, and what is above moves away with every update."""
    log = base(seed, ("async", "code", "moe", "dapo"))
    log.make_async()
    share = float(log.rng.choice([0.125, 0.25, 0.25, 0.33]))
    fresh = 1.5 * log.m["_gap"] * np.exp(log.rng.normal(0, log.m["_gap_noise"][0], log.n))
    far = log.log(4, 14)  # after a hundred steps, or at the end
    power, over = log.uni(0.6, 1.0), min(log.n - log.at, 100)
    old = fresh * np.sqrt(1 + ((far - 1) * (log.since / over) ** power) ** 2)
    now = np.where(log.on, share, 0.0)
    prefix, log.needs_digits = log.pick("training/logprob_gap/", "logprob_gap/"), True
    log.m[prefix + "mean"] = (1 - now) * fresh + now * old
    for q in (50, 95, 99):
        noise = np.exp(log.rng.normal(0, 0.02, log.n))
        log.m[f"{prefix}p{q}"] = noise * np.where(
            log.on, _quantile(share, fresh, old, q / 100), _quantile(0.0, fresh, fresh, q / 100)
        )
    drop(log, AGE, WORST, OFF, DIFF, CORR, "training/rollout_actor")
    return log


def missed_without_versions(seed: int) -> Log:
    """Publications fail without a word in a job that logs no versions: engine and trainer part as the updates add up,
    until somebody restarts the engines, and the gap is back in one step; or to the end."""
    log = base(seed, IN_STEP)
    log.needs = GAP
    over = int(min(log.n - log.at - 4, log.uni(20, 90)))
    until = log.at + over if log.coin(0.6) else log.n
    where = np.asarray(log.on & (log.t < until))
    rate = (log.log(3, 12) - 1) / over ** (power := log.uni(0.65, 1.0))
    log.grow_gap(np.sqrt(1 + (rate * (log.since + 1) ** power) ** 2), where)
    solved = log.m["_solved"]
    log.set_solved(np.where(where, solved[log.at] * (1 - 0.08 * log.ramp()), solved))
    return log


_STORIES: tuple[tuple[Callable[[int], Log], tuple[str, ...]], ...] = (
    (lost_in_flight, ("buffer_never_fills",)),
    (leak_by_count, ("sandbox_leak",)),
    (half_a_pool, ("dead_sandbox_pool",)),
    (rare_tail, ("tail_burst",)),
    (rare_call, ("tail_burst", "slow_environment")),
    (spill_in_words, ("object_store_spill",)),
    (spill_in_every_stage, ("object_store_spill",)),
    (brim_before_the_end, ("oom_in_sync",)),
    (moments_lost, ("discontinuity_after_resume",)),
    (hang_in_a_dump, ("collective_hang",)),
    (drift_by_replica, ("version_drift",)),
    (drift_in_two_humps, ("version_drift",)),
    (missed_without_versions, ("missed_weight_sync",)),
)
FAULTS = {tell.__name__: tell for tell, _ in _STORIES}
EXPECTS = {tell.__name__: verdicts for tell, verdicts in _STORIES}
"""Story -> the verdicts that are right."""

OWN = (
    "sandbox/", "env/", "buffer/", "queue/", "rollout/groups", "rollout/num_finished", "rollout/replica_", "replica/",
    "engine/", "memory/", "logprob_gap/", "training/logprob_gap/", "training/weight_version",
)  # fmt: skip
"""What the owner of the job logs beside the framework's metrics."""
CALLS = {f"{TOOL}{stat}": f"env/call_s/{stat}" for stat in ("mean", "max", "min")}

_WORDS = frozenset({"spill_in_words", "hang_in_a_dump"})
_BY_OWN_NAMES = frozenset(
    {"lost_in_flight", "leak_by_count", "half_a_pool", "rare_call", "drift_by_replica", "drift_in_two_humps"}
)
_OF_SAMPLES = frozenset({"rare_tail", "moments_lost", "missed_without_versions"})
TELLS: dict[str, frozenset[str]] = {
    "verl file": frozenset({*FAULTS, *WELL} - _WORDS),
    "verl console": frozenset({*FAULTS, *WELL}),
    "SkyRL": frozenset(_OF_SAMPLES | _BY_OWN_NAMES | {"spill_in_every_stage"} | set(WELL)),
    "slime": frozenset(_OF_SAMPLES | _BY_OWN_NAMES | _WORDS | set(WELL)),
    "AReaL": frozenset(_OF_SAMPLES | _BY_OWN_NAMES | {"spill_in_every_stage"} | _WORDS | set(WELL)),
    "TRL": frozenset({*_OF_SAMPLES, *WELL} - {"slow_evaluation", "waits_in_spells"}),
}
"""Format -> the stories that can be told in it."""


def make(name: str, seed: int) -> Log:
    """One story; each takes jobs of its own."""
    return {**FAULTS, **WELL}[name](zlib.crc32(name.encode()) + seed)


def write(format: str, name: str, seed: int, folder: Path) -> Path | None:
    """The log of one story; None where this format does not tell it."""
    if name not in TELLS[format]:
        return None
    log = make(name, seed)
    if format == "verl file":
        return reported_runs.write_jsonl(log, folder / "exp.jsonl")
    if format == "verl console":
        return reported_runs.write_console(log, folder / "run.log")
    log.share = 1.0  # the others log what they log
    if DIFF + "mean" in log.m and format in other_formats.GAP:
        log.m[other_formats.GAP[format]] = other_formats.gap_nats(log.m[DIFF + "mean"])
    rows = [row for row in reported_runs.rows(log) if row[0] > 0]
    names = {**other_formats.NAMES[format], **CALLS}
    rows = other_formats.renamed(rows, names, (*OWN, *other_formats.GAP.values()))
    return other_formats.WRITERS[format](rows, log.lines, folder / "run.log")
