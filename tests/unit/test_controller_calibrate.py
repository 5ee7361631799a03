"""Calibration on a machine that others use: bursts hit one measurement of a size, and its median does not care."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollbook.algos.config import AlgorithmConfig
from rollbook.controller import calibrate, contention, expectation, plan, rehearsal
from rollbook.controller.calibrate import TypicalWork
from rollbook.controller.evaluate import Evaluator
from rollbook.controller.objective import PolicyObjective
from rollbook.controller.rehearsal import Rehearsal
from rollbook.ledger.fit import fit_call, fit_decode, fit_pass, fit_train
from rollbook.ledger.hardware import MachineSpec, PassFit, TrainFit
from rollbook.observe.run_dir import read_json_lines
from rollbook.rollout.engine import EngineStats
from rollbook.trainer import ceilings
from tiny_run import TinyRun

NOTING = PolicyObjective(AlgorithmConfig(), proximal_is_current=True)
WORK = TypicalWork(prompt_tokens=8, response_tokens=8, group_size=2, num_sequences=32, micro_batch_tokens=240)


MACHINE = MachineSpec(
    name="a", device="cpu", gemm_flops_per_s={"float32": 1e11}, copy_bytes_per_s=1e10, memory_bytes=1 << 34
)


class LoadedEngine:
    """Decode steps of 1 ms + 10 us a row, prefill of 100 us + 1 us a token; every fifth measurement takes five times
    as long."""

    def __init__(self) -> None:
        self.rows = 0
        self.num_prompt_tokens = 0
        self.num_readings = 0
        self.totals = EngineStats(
            weight_version=0, num_running=0, num_waiting=0, num_slots=32, kv_pool_tokens=1 << 16, kv_used_tokens=0,
            prefill_tokens=0, cached_prompt_tokens=0, decode_tokens=0, decode_steps=0, num_preemptions=0, busy_s=0.0,
        )  # fmt: skip

    async def generate(self, request: Any) -> None:
        self.rows += 1
        self.num_prompt_tokens += len(request.prompt_ids)

    async def stats(self) -> EngineStats:
        if self.rows:
            self.num_readings += 1
            load = 5.0 if self.num_readings % 5 == 0 else 1.0
            self.totals = replace(
                self.totals,
                decode_steps=self.totals.decode_steps + 8,
                decode_s=self.totals.decode_s + 8 * load * (1e-3 + 1e-5 * self.rows),
                prefill_s=self.totals.prefill_s + load * (1e-4 + 1e-6 * self.num_prompt_tokens),
            )
        self.rows = self.num_prompt_tokens = 0
        return self.totals


async def test_bursts_do_not_reach_the_decode_fit() -> None:
    engine = LoadedEngine()
    facts = SimpleNamespace(vocab_size=64, max_position=4096)
    decode, prefill = await calibrate._decode_points(engine, facts, WORK, page_tokens=8)  # type: ignore[arg-type]
    fit = fit_decode(decode, prefill)
    assert fit.base_s == pytest.approx(1e-3, rel=1e-3) and fit.per_row_s == pytest.approx(1e-5, rel=1e-3)
    assert fit.prefill_tokens_per_s == pytest.approx(1e6, rel=1e-3)
    assert fit.error_frac < 1e-3


class LoadedTrainer:
    """A forward of 1 ms + 10 us a token, an update three times that and 2 ms of optimizer; its clock is moved by the
    work, and every fifth piece of work takes five times as long."""

    model = SimpleNamespace(facts=SimpleNamespace(vocab_size=64), device=SimpleNamespace(type="cpu"))

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_pieces = 0
        self.optimizer_s = 2e-3
        self.call_s = (0.0, 0.0)

    def measure_optimizer(self) -> float:
        began_s = self.now_s
        self.work(self.optimizer_s)
        return self.now_s - began_s

    def carry(self, batch: Any) -> None:
        base_s, token_s = self.call_s
        self.now_s += base_s + token_s * self._tokens(batch)

    def work(self, seconds: float) -> None:
        self.num_pieces += 1
        self.now_s += seconds * (5.0 if self.num_pieces % 5 == 0 else 1.0)

    def keep_state(self) -> None: ...

    def put_back_state(self) -> None: ...

    def make_batch(self, sequences: list[Any], **_: Any) -> SimpleNamespace:
        return SimpleNamespace(sequences=sequences, mini_batches=[])

    def _tokens(self, batch: Any) -> int:
        return sum(len(s.token_ids) for s in batch.sequences)

    def fill_proximal(self, batch: Any) -> None:
        self.carry(batch)
        self.work(1e-3 + 1e-5 * self._tokens(batch))

    def update(self, batch: Any, objective: Any, lr: float) -> dict[str, Any]:
        self.carry(batch)
        self.work(3 * (1e-3 + 1e-5 * self._tokens(batch)) + 2e-3)
        return {
            "trainer/actor_micro_batches": SimpleNamespace(result=lambda: 1),
            "trainer/actor_tokens": SimpleNamespace(result=lambda: self._tokens(batch)),
        }


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoadedTrainer]:
    made = LoadedTrainer()
    monkeypatch.setattr(calibrate, "time", SimpleNamespace(perf_counter=lambda: made.now_s))
    yield made
    assert time.perf_counter() > 0


def test_bursts_do_not_reach_the_training_fit(trainer: LoadedTrainer) -> None:
    points = calibrate._train_points(trainer, WORK, {}, NOTING)  # type: ignore[arg-type]
    fit = fit_train(points.train, points.forward, optimizer_s=points.optimizer_s, num_params=1000)
    assert points.optimizer_s == pytest.approx(2e-3)
    assert fit.forward_tokens_per_s == pytest.approx(1e5, rel=1e-3)
    assert fit.tokens_per_s == pytest.approx(1e5 / 3, rel=1e-3)
    assert fit.per_micro_batch_s == pytest.approx(3e-3, rel=1e-3)


def test_the_way_to_a_trainer_elsewhere_is_measured_apart_from_its_passes(trainer: LoadedTrainer) -> None:
    """4 ms a call and 2 us a token, whatever is computed: the fits of the passes are those of a trainer beside."""
    trainer.call_s = (4e-3, 2e-6)
    points = calibrate._train_points(trainer, WORK, {"values": trainer.fill_proximal}, NOTING)  # type: ignore[arg-type]
    call = fit_call(points.calls)
    assert (call.base_s, 1 / call.tokens_per_s) == pytest.approx((4e-3, 2e-6), rel=1e-3)
    fit = fit_train(points.train, points.forward, optimizer_s=points.optimizer_s, num_params=1000)
    assert fit.forward_tokens_per_s == pytest.approx(1e5, rel=1e-3)
    assert fit.per_micro_batch_s == pytest.approx(3e-3, rel=1e-3)
    assert fit_pass(points.others["values"]).per_micro_batch_s == pytest.approx(1e-3, rel=1e-3)


def test_an_update_is_never_taken_for_less_than_two_forwards(trainer: LoadedTrainer) -> None:
    """An optimizer measured in a slow moment would leave nothing, or less, for forward and backward."""
    trainer.optimizer_s = 1.0
    points = calibrate._train_points(trainer, WORK, {}, NOTING)  # type: ignore[arg-type]
    alone = {p.num_tokens: p.seconds for p in points.forward}
    for update in points.train:
        assert update.seconds >= 2 * alone[update.num_tokens] > 0
    assert np.isfinite([p.seconds for p in points.train]).all()


def test_passes_are_measured_at_the_sizes_of_the_run() -> None:
    """240 tokens hold ten groups of 8 + 2 x 8; a step of 16 groups in two mini batches has eight of them in an update,
    but up to ten in a forward, which goes over the whole step."""
    update = replace(WORK, num_mini_batches=2)
    assert calibrate._group_counts(update) == [1, 2, 8]
    assert calibrate._group_counts(WORK) == [1, 3, 10, 20]


def test_another_network_is_measured_by_its_own_passes(trainer: LoadedTrainer) -> None:
    """A teacher ten times as slow as the policy's forward."""

    def teach(batch: Any) -> None:
        trainer.work(1e-2 + 1e-4 * trainer._tokens(batch))

    points = calibrate._train_points(trainer, WORK, {"teacher": teach}, NOTING)  # type: ignore[arg-type]
    fit = fit_pass(points.others["teacher"])
    assert fit.tokens_per_s == pytest.approx(1e4, rel=1e-2)
    assert fit.per_micro_batch_s == pytest.approx(1e-2, rel=0.1)
    assert set(points.others) == {"teacher"}


def test_a_line_through_all_and_few_splits_the_host_into_base_and_share() -> None:
    """Packing: 1 ms + 10 us a sequence; reporting: 40 us of each of 64 trajectories + 100 us of a trained one."""
    one = Rehearsal(
        num_scored=64,
        num_sequences=(64, 4),
        pack_s=(1e-3 + 64e-5, 1e-3 + 4e-5),
        forwards_s={"proximal": 0.1},
        advantage_s=(64e-5, 4e-5),
        report_s=(64 * 40e-6 + 64 * 100e-6, 64 * 40e-6 + 4 * 100e-6),
        texts_s=1.0,
        sync_s=0.02,
        probe_s=0.03,
        published_bytes=10_000_000,
    )
    slow = replace(one, pack_s=(1.0, 1.0), sync_s=5.0)
    made = rehearsal.with_rehearsals(MACHINE, [one, slow, one], reports_every=1)
    assert made.host is not None
    assert (made.host.pack_base_s, made.host.pack_s) == pytest.approx((1e-3, 1e-5))
    assert (made.host.advantage_base_s, made.host.advantage_s) == pytest.approx((0.0, 1e-5), abs=1e-9)
    assert (made.host.report_s, made.host.report_trained_s) == pytest.approx((40e-6, 100e-6))
    assert (made.digest_bytes_per_s, made.sync_base_s) == pytest.approx((5e8, 0.03))


def test_texts_of_new_tokens_are_planned_as_they_become_fewer() -> None:
    """Each rehearsal, half a step, leaves nine tenths of what it met: a step writes for 0.19 s, the next 0.15."""
    rehearsed_s = [0.1 * 0.9**n for n in range(4)]
    planned_s = rehearsal.mean_texts_s(rehearsed_s, step_frac=0.5, steps=range(2, 5), every=1)
    assert planned_s == pytest.approx(0.19 * (0.81**2 + 0.81**3 + 0.81**4) / 3)
    # Every second step has a file: steps 2 and 4 of these three, with the second and the third file.
    seldom_s = rehearsal.mean_texts_s(rehearsed_s, step_frac=0.5, steps=range(2, 5), every=2)
    assert seldom_s == pytest.approx(0.19 * (0.81 + 0.81**2) / 3)
    assert rehearsal.mean_texts_s([0.0, 0.0], step_frac=1.0, steps=range(2), every=1) == 0
    assert 0 < rehearsal.mean_texts_s([0.1, 0.2], step_frac=1.0, steps=range(2), every=1) <= 0.1


def test_each_forward_is_scaled_by_its_own_rehearsal() -> None:
    """The critic's values took 1.5 times as long as its fit says, the reference, which is as large as the policy, 1.1
    times; what has no rehearsal, an update, stays as it was measured."""
    fit = PassFit(per_micro_batch_s=0.01, tokens_per_s=1e5)
    policy = TrainFit(
        per_micro_batch_s=0.03,
        tokens_per_s=3e4,
        forward_tokens_per_s=1e5,
        forward_per_micro_batch_s=0.01,
        optimizer_s_per_param=0.0,
        error_frac=0.1,
    )
    machine = replace(MACHINE, train=policy, passes={"values": fit, "critic": fit})
    scaled = expectation._with_forwards(machine, {"values": 1.5, "reference": 1.1})
    assert scaled.passes == {"values": fit.scaled(1.5), "critic": fit}
    assert scaled.train == policy.with_forwards_scaled(1.1)
    assert expectation._with_forwards(machine, {"values": 1.5}).train == policy


def test_host_work_is_measured_at_the_sizes_that_filters_leave(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All groups of a step, and a quarter of them."""
    seen: list[Rehearsal] = []

    def with_rehearsals(machine: MachineSpec, rehearsals: list[Rehearsal], **keywords: Any) -> MachineSpec:
        seen.extend(rehearsals)
        return rehearsal.with_rehearsals(machine, rehearsals, **keywords)

    monkeypatch.setattr(expectation, "with_rehearsals", with_rehearsals)
    monkeypatch.setattr(calibrate, "ROUNDS_S", 0.1)
    tiny_run(num_steps=1, **{"plan.is_on": True, "run.groups_per_step": 8})
    assert {each.num_sequences for each in seen} == {(16, 4)}


def test_rehearsals_tell_of_every_group_that_a_filter_leaves_out_and_write_a_token_once(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 groups 6 are left out of each rehearsal's second step, as a filter would leave them; one folder holds all
    of them, so the text of a token is written in the first alone, as in a run. The collector looks at new objects
    alone, as after a run's first step."""
    frozen: list[int] = []
    events: list[dict[str, Any]] = []
    folders: set[Any] = set()
    written: list[int] = []
    plain = rehearsal.rehearse

    async def rehearse(controller: Any, groups: Any, recorder: Any) -> Rehearsal | None:
        found = await plain(controller, groups, recorder)
        written.append(len(list(read_json_lines(recorder.run_dir.tokens.path))))
        frozen.append(gc.get_freeze_count())
        folders.add(recorder.path)
        events[:] = read_json_lines(recorder.run_dir.events.path)
        return found

    monkeypatch.setattr(expectation, "rehearse", rehearse)
    monkeypatch.setattr(calibrate, "ROUNDS_S", 0.1)
    run = tiny_run(num_steps=1, **{"plan.is_on": True, "run.groups_per_step": 8})
    evicted = [event for event in events if event["kind"] == "eviction"]
    num_rehearsals = sum(event["kind"] == "span" and event["name"] == "step" for event in events) // 2
    assert len(folders) == 1 and num_rehearsals > calibrate.FEW_REPEATS
    assert len(evicted) == 6 * num_rehearsals and min(frozen) > 0
    assert written[0] > 0 and sorted(written) == written
    assert not any(event.get("reason") == "flat" and event["step"] == 0 for event in evicted)
    assert not folders.pop().exists() and (run.folder / "metrics.jsonl").exists()


def test_held_out_prompts_are_asked_before_they_are_planned(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the seconds that a step's coefficients give for them are planned where they took twice as long. Each time
    the engine has just been probed, as after a publication: that it held the first tokens of many prompts made their
    prefills five times as long on an H200."""
    found: list[expectation.Evaluation] = []
    controllers: list[Any] = []
    plain = expectation.rollout_of
    monkeypatch.setattr(calibrate, "ROUNDS_S", 0.1)

    class Clock:
        """Every answer to the held-out prompts takes 3 s by it."""

        now_s = 0.0

        @classmethod
        def perf_counter(cls) -> float:
            cls.now_s += 3.0
            return cls.now_s

    evaluate, answer = expectation._evaluation, Evaluator.answer
    probes_before: list[int] = []

    async def answered(evaluator: Evaluator, *args: Any, **keywords: Any) -> Any:
        probes_before.append(controllers[0].prober.num_checked)
        return await answer(evaluator, *args, **keywords)

    async def evaluation(controller: Any, *args: Any) -> Any:
        controllers.append(controller)
        monkeypatch.setattr(Evaluator, "answer", answered)
        monkeypatch.setattr(expectation, "time", Clock)
        for module in (expectation, plan):
            monkeypatch.setattr(module, "rollout_of", lambda *_: (1.0, 0.5))
        made = await evaluate(controller, *args)
        monkeypatch.setattr(Evaluator, "answer", answer)
        found.append(made[0])
        for module in (expectation, plan):
            monkeypatch.setattr(module, "rollout_of", plain)
        monkeypatch.setattr(expectation, "time", time)
        assert made[1].seconds == pytest.approx(3.0)
        return made

    monkeypatch.setattr(expectation, "_evaluation", evaluation)
    held_out = {"eval.num_prompts": 4, "data.held_out_frac": 0.2, "eval.every_steps": 1}
    tiny_run(num_steps=1, **{"plan.is_on": True, **held_out})
    assert [(e.ratio, e.work.num_groups) for e in found] == [(pytest.approx(2.0), 4)]
    assert probes_before and all(after > before for before, after in itertools.pairwise(probes_before))


@pytest.mark.parametrize("schedule", ["sync", "separate_async"])
def test_engines_are_as_slow_as_their_own_clock_says_and_the_rest_of_a_sample_is_paid_by_the_trajectory(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """Samples of 8 trajectories in which engines decoded for 3 s and prefilled for 1 s, and nothing for 1.6 s more. In
    turns a step has both; beside the trainer engines compute while others are scored."""
    plain = expectation._sample

    async def sample(*args: Any, **keywords: Any) -> expectation.Sample:
        return replace(await plain(*args, **keywords), decode_s=3.0, prefill_s=1.0, elapsed_s=5.6)

    monkeypatch.setattr(expectation, "_sample", sample)
    monkeypatch.setattr(calibrate, "ROUNDS_S", 0.1)
    monkeypatch.setattr(contention, "WINDOW_S", 0.05)
    monkeypatch.setattr(contention, "CONTENTION_ROUNDS", 1)
    overrides: dict[str, Any] = {"run.schedule": schedule, "plan.is_on": True}
    if schedule == "separate_async":
        overrides["buffer.max_staleness_steps"] = 1
    run = tiny_run(num_steps=1, **overrides)
    plan = json.loads((run.folder / "plan.json").read_text())
    assert plan["machine"]["coefficients"]["reward_s"] == pytest.approx(0.2)
    fit, num_prompts = plan["machine"]["coefficients"]["decode"], 4
    prompt_tokens = num_prompts * (plan["workload"]["prompt_tokens"] - 1)
    assert fit["prefill_base_s"] + prompt_tokens / fit["prefill_tokens_per_s"] == pytest.approx(1.0, rel=0.2)
    stages = {name: stage["seconds"] for name, stage in plan["stages"].items()}
    if schedule == "sync":
        assert stages["rollout"] == pytest.approx(4.0 + 1.6, abs=1.2)
        return
    # The loop waits for what was not generated beside its own stages. Slots that are filled again make fewer decode
    # steps; how much that saves is the machine's, and the seconds of a score are in none of it.
    own_s = sum(stages[name] for name in stages.keys() - {"rollout", "reward", "checkpoint", "step"})
    beside_s = own_s / plan["machine"]["coefficients"]["contention"]["engine"]
    assert stages["rollout"] < 4.0 + 1.2
    assert stages["rollout"] == 0 or stages["rollout"] + beside_s > 1.0


TEACHER = {
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "intermediate_size": 64,
    "alphabet": "0123456789+=",
}


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param({"algorithm.name": "ppo"}, id="values"),
        pytest.param({"algorithm.kl.placement": "reward", "algorithm.kl.coef": 0.1}, id="kl in the reward"),
        pytest.param({"algorithm.kl.placement": "loss", "algorithm.kl.coef": 0.1}, id="kl in the loss"),
        pytest.param(
            {
                "algorithm.distill.placement": "advantage",
                "algorithm.distill.coef": 0.5,
                "teacher.new": TEACHER,
            },
            id="teacher",
        ),
        pytest.param({"algorithm.proximal": "behavior"}, id="no forward"),
        pytest.param({"algorithm.correction.level": "token", "rollout.mismatch": "int8"}, id="corrected"),
    ],
)
def test_whatever_an_algorithm_reads_is_there_when_its_host_work_is_measured(
    algorithm: dict[str, Any], tiny_run: TinyRun
) -> None:
    run = tiny_run(num_steps=1, **{"plan.is_on": True}, **algorithm)
    (plan,) = run.events_of("plan")
    assert plan["stages"]["adv"] > 0


def test_every_pass_of_a_step_has_an_expectation(tiny_run: TinyRun) -> None:
    """A critic, a reference, a teacher, and adapters on the policy: no stage of the step is unplanned."""
    run = tiny_run(
        num_steps=1,
        **{
            "plan.is_on": True,
            "algorithm.name": "ppo",
            "algorithm.kl.placement": "reward",
            "algorithm.kl.coef": 0.1,
            "algorithm.distill.placement": "advantage",
            "algorithm.distill.coef": 0.5,
            "teacher.new": TEACHER,
            "model.lora.rank": 2,
            "critic.backbone": "shared",
        },
    )
    (step,) = run.metrics
    timed = {name.removeprefix("timing_s/") for name in step if name.startswith("timing_s/")}
    planned = {name.removeprefix("expected_s/") for name in step if name.startswith("expected_s/")}
    assert {"ref", "teacher", "values", "update_critic", "update_actor", "update_weights"} <= timed
    assert timed - planned <= {"other", "testing"}  # between the stages; no evaluation was due
    assert all(step[f"expected_s/{name}"] > 0 for name in planned)


class PacedController:
    """Passes of 10 ms on a clock that they and the engines' answers move; a pass takes half as long again while a step
    is being answered, and a token twice as long while a pass is made."""

    def __init__(self, clock: PacedClock, bound: int) -> None:
        self.clock = clock
        self.config = SimpleNamespace(buffer=SimpleNamespace(max_staleness_steps=bound))
        self.num_passes = 0
        self.num_asked = 0
        self.most_ahead = 0
        self.num_running = 0
        self.is_training = False
        self.needs_proximal = True
        self.busy_s, self.num_tokens = 0.0, 0
        self.trainer = self
        self.router = SimpleNamespace(engines=[self])

    # the trainer

    def make_batch(self, sequences: Any, **_: Any) -> Any:
        return None

    def keep_state(self) -> None: ...

    def put_back_state(self) -> None: ...

    def fill_proximal(self, batch: Any) -> float:
        return 0.0

    def update(self, batch: Any, objective: Any, lr: float) -> float:
        self.num_passes += 1
        return 0.010

    async def compute(self, work: Any) -> None:
        seconds = work() or 0.0
        self.is_training = True
        for _ in range(10 if seconds else 0):
            self.clock.now_s += seconds / 10 * (1.5 if self.num_running else 1.0)
            self.decode()
            await asyncio.sleep(0)
        self.is_training = False

    # the engines

    def decode(self) -> None:
        if self.num_running:
            self.busy_s += 1e-4 * (2.0 if self.is_training else 1.0)
            self.num_tokens += 1

    async def stats(self) -> Any:
        return SimpleNamespace(busy_s=self.busy_s, decode_tokens=self.num_tokens)

    async def answer(self, number: int) -> None:
        self.num_asked += 1
        self.num_running += 1
        self.most_ahead = max(self.most_ahead, self.num_running)
        try:
            await asyncio.sleep(3600)
        finally:
            self.num_running -= 1


class PacedClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


async def test_engines_are_given_a_step_with_each_pass_and_no_more_than_the_bound_admits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Full engines beside a trainer that keeps up with them would say that it is slower than it will be."""
    clock = PacedClock()
    controller = PacedController(clock, bound=500)

    async def sleep(seconds: float, plain: Any = asyncio.sleep) -> None:
        if not seconds or seconds == 3600:
            await plain(seconds)
            return
        for _ in range(10):
            clock.now_s += seconds / 10
            controller.decode()
            await plain(0)

    async def publish(controller: Any) -> float:
        return 2e-3

    monkeypatch.setattr(contention, "time", clock)
    monkeypatch.setattr(contention, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    monkeypatch.setattr(contention, "_published_s", publish)
    monkeypatch.setattr(calibrate, "_sequences", lambda *_: [])
    found = await contention.measure_contention(controller, WORK, controller.answer)  # type: ignore[arg-type]
    assert found.trainer == pytest.approx(1.5)
    assert found.engine == pytest.approx(2.0)
    assert found.publication == 1.0
    rounds = contention.CONTENTION_ROUNDS
    assert controller.num_asked <= controller.num_passes + rounds * (2 + 101), (
        "one step a pass, and the first"
    )
    assert controller.num_running == 0, "what was under way is cancelled"


async def test_a_pass_waits_for_answers_where_the_engines_are_as_far_ahead_as_they_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a bound of 1 two steps are under way at most, and one of them is waited for."""
    clock = PacedClock()
    controller = PacedController(clock, bound=1)
    answered = 0

    async def answer(number: int) -> None:
        nonlocal answered
        controller.num_running += 1
        controller.most_ahead = max(controller.most_ahead, controller.num_running)
        try:
            for _ in range(35):
                clock.now_s += 1e-4
                await asyncio.sleep(0)
            answered += 1
        finally:
            controller.num_running -= 1

    async def publish(controller: Any) -> float:
        return 2e-3

    async def sleep(seconds: float, plain: Any = asyncio.sleep) -> None:
        clock.now_s += seconds
        await plain(0)

    monkeypatch.setattr(contention, "time", clock)
    monkeypatch.setattr(contention, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    monkeypatch.setattr(contention, "_published_s", publish)
    monkeypatch.setattr(calibrate, "_sequences", lambda *_: [])
    monkeypatch.setattr(contention, "CONTENTION_ROUNDS", 1)
    await contention.measure_contention(controller, WORK, answer)  # type: ignore[arg-type]
    assert controller.most_ahead == 2 < answered


def test_a_slow_product_is_measured_at_a_quarter_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 without instructions for it: six products of 1,024 took 18 s."""
    multiplied: list[tuple[torch.dtype, int]] = []

    def median_s(device: torch.device, work: Any) -> float:
        if getattr(work, "func", None) is not torch.matmul:
            return 1e-3
        a = work.args[0]
        multiplied.append((a.dtype, len(a)))
        rate = {torch.float32: 1e11, torch.bfloat16: 5e8}[a.dtype]
        return float(2 * len(a) ** 3 / rate)

    monkeypatch.setattr(ceilings, "_median_s", median_s)
    made = ceilings.measure_machine(torch.device("cpu"))
    assert made.gemm_flops_per_s == pytest.approx({"float32": 1e11, "bfloat16": 5e8})
    assert multiplied == [(torch.float32, 256), (torch.float32, 1024), (torch.bfloat16, 256)]
