"""A log that ends in one line said again and again, and no step: what it waits for is named, whatever the wording."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose

BEGIN = datetime(2026, 3, 4, 20, 0, 0)
STEP_S = 120


def _steps(count: int = 20) -> list[str]:
    return [
        f"(TaskRunner pid=81) step:{i} - critic/rewards/mean:{0.4 + 0.001 * i} - actor/entropy:0.3 - "
        f"response_length/mean:800.0 - timing_s/gen:60.0 - timing_s/step:{STEP_S}.0"
        for i in range(1, count + 1)
    ]


def _ended(tmp_path: Path, lines: Iterable[str]) -> Path:
    log = tmp_path / "run.log"
    log.write_text("\n".join([*_steps(), *lines]) + "\n", encoding="utf-8")
    return log


def _again(
    says: Callable[[int], str], *, count: int = 40, every_s: int = 60, stamp: str = "%Y-%m-%d %H:%M:%S"
) -> list[str]:
    at = (BEGIN + timedelta(seconds=i * every_s) for i in range(count))
    return [f"(TaskRunner pid=81) {time.strftime(stamp)} INFO {says(i)}" for i, time in enumerate(at)]


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("replay buffer has 60 of 64 groups, waiting", "buffer_never_fills"),
        ("still short of 3 trajectories for this batch", "buffer_never_fills"),
        ("queue of work: pending 0, running 2, finished 62", "buffer_never_fills"),
        ("62 done, 2 running, 0 pending", "buffer_never_fills"),
        ("rank 3 waits at a barrier for rank 5", "collective_hang"),
        ("waiting for the licence server", "run_stopped"),
    ],
)
def test_what_the_line_waits_for_names_the_fault(words: str, rule: str, tmp_path: Path) -> None:
    diagnosis = diagnose(load(str(_ended(tmp_path, _again(lambda _: words)))))
    found = diagnosis.findings[0]
    assert (diagnosis.verdict, found.step, found.cost_s is not None or rule == "collective_hang") == (
        rule,
        20,
        True,
    )
    assert words in found.evidence[0].says


@pytest.mark.parametrize(
    "words", ["Collected 61/64 groups", "61/64 rollouts finished", "[Queue] received: 61 of 64 samples"]
)
def test_a_count_that_stays_short_waits_whether_it_says_so_or_not(words: str, tmp_path: Path) -> None:
    assert diagnose(load(str(_ended(tmp_path, _again(lambda _: words))))).verdict == "buffer_never_fills"


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ("no reply to a broadcast in 60 seconds, some processes may be hanging", "collective_hang"),
        ("waits for a broadcast to end, 60 seconds", "well"),
    ],
)
def test_what_is_said_to_hang_need_not_last_as_long_as_what_waits(
    words: str, verdict: str, tmp_path: Path
) -> None:
    """Thirteen minutes, of steps that take four."""
    log = tmp_path / "run.log"
    steps = [line.replace(f"timing_s/step:{STEP_S}", "timing_s/step:240") for line in _steps()]
    log.write_text("\n".join([*steps, *_again(lambda _: words, count=14)]) + "\n", encoding="utf-8")
    assert diagnose(load(str(log))).verdict in (verdict, "not_judged" if verdict == "well" else verdict)


@pytest.mark.parametrize("stamp", ["[%H:%M:%S]", "%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S.123"])
def test_stamps_of_any_kind_tell_how_long(stamp: str, tmp_path: Path) -> None:
    """Six hours from eight in the evening on: over midnight."""
    log = _ended(
        tmp_path, _again(lambda _: "waiting for rollout workers", every_s=600, count=37, stamp=stamp)
    )
    event = next(e for e in load(str(log)).events if e.kind == "standstill")
    assert event.fields == {"lasted_s": 21_600.0, "count": 37, "beside": ()}


def test_seconds_and_attempts_that_the_line_counts_are_no_movement(tmp_path: Path) -> None:
    log = _ended(tmp_path, _again(lambda i: f"attempt {i}: samples not ready, waited {60 * i} s (61/64)"))
    assert diagnose(load(str(log))).verdict == "buffer_never_fills"


@pytest.mark.parametrize(
    "lines",
    [
        _again(lambda i: f"waiting for samples, collected {i}/64"),
        [*_again(lambda i: f"waiting for samples, collected {min(i, 36)}/64")],
        _again(lambda _: "waiting for samples, collected 9/64", every_s=10),
        _again(lambda _: "waiting for samples, collected 9/64", count=4, every_s=3600),
        _again(lambda i: f"rollout: {i}%|##   | {i}/100 [00:{i:02d}<10:00, still 3.2s/it]"),
        [*_again(lambda _: "waiting for samples"), "Training Progress: 100%|####| 20/20 [40:00<00:00]"],
        ["Final validation metrics: {}", *_again(lambda _: "waiting for the samples to be uploaded")],
        [
            *_again(lambda _: "waiting for samples"),
            *_again(lambda i: f"loaded shard {i}", count=40, every_s=120),
        ],
        [*_again(lambda _: "collected 61/64 groups"), *_again(lambda i: f"loaded {i}", every_s=120)],
        _again(lambda i: f"collected {i + 1}/64 groups"),
        _again(lambda _: "wrote part 61/64 of the samples to the store"),
        [f"(TaskRunner pid=81) waiting for samples, collected 9/64 {'.' * i}" for i in range(40)],
        _again(lambda _: "POST /generate HTTP/1.1 200 OK"),
    ],
    ids=[
        "numbers that move",
        "that moved until three minutes ago",
        "a slow step that is being logged",
        "said four times",
        "a progress bar",
        "a run that is over after it",
        "a run that was over before it",
        "other lines since",
        "other lines since the count",
        "a count that moves",
        "a count of nothing that comes",
        "no stamps",
        "no words of waiting",
    ],
)
def test_a_run_that_goes_on_or_is_over_raises_no_alarm(lines: list[str], tmp_path: Path) -> None:
    assert diagnose(load(str(_ended(tmp_path, lines)))).findings == ()


def test_a_worker_that_died_before_the_others_waited_for_hours_ended_nothing(tmp_path: Path) -> None:
    """The same words are the end where nobody waits."""
    died = "(raylet) A worker died or was killed while executing a task. Worker exit type: SYSTEM_ERROR"
    waits = _again(lambda _: "queue of work: pending 0, running 2, finished 62")
    found = {
        bool(after): diagnose(load(str(_ended(tmp_path, [died, *after])))).findings for after in (waits, [])
    }
    assert [f.rule for f in found[True]] == ["buffer_never_fills"]
    assert any("A worker died" in item.says for item in found[True][0].evidence)
    assert [f.rule for f in found[False]] == ["run_stopped"]


def test_waiting_before_a_step_is_forgotten(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    lines = [*_steps(20)[:10], *_again(lambda _: "waiting for samples, 60/64"), *_steps(20)[10:]]
    log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert diagnose(load(str(log))).findings == ()


def _bar(at: int, of: int, minutes: int, name: str = "Rollout generation") -> str:
    passed = f"{minutes // 60}:{minutes % 60:02d}:30" if minutes >= 60 else f"{minutes:02d}:30"
    return (
        f"(RolloutManager pid=81) {name}:  {100 * at // of}%|####     | {at}/{of} [{passed}<00:03,  8.10s/it]"
    )


STANDS = [_bar(i, 64, i // 10) for i in range(20, 61, 5)] + [_bar(61, 64, m) for m in range(7, 98, 10)]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("Rollout generation", "buffer_never_fills"),
        ("Generating rollouts (train)", "buffer_never_fills"),
        ("Training Progress", "run_stopped"),
    ],
)
def test_a_bar_that_stands_still_while_its_own_clock_runs_is_a_standstill(
    name: str, rule: str, tmp_path: Path
) -> None:
    bars = [line.replace("Rollout generation", name) for line in STANDS]
    found = diagnose(load(str(_ended(tmp_path, bars)))).findings
    assert [(f.rule, f.step, f.cost_s) for f in found] == [(rule, 20, 5400.0)]


@pytest.mark.parametrize(
    "lines",
    [
        [_bar(i, 100, 2 * i) for i in range(1, 60)],  # it moves, slowly
        [*STANDS, _bar(62, 64, 110)],  # it moved again
        [*STANDS, _bar(64, 64, 110)],  # and came to its end
        [_bar(61, 64, m) for m in (1, 3, 5)],  # a step that takes its time
        [*STANDS, _bar(1, 64, 0), _bar(1, 64, 2)],  # another one was begun
        [_bar(61, 64, 97)],  # drawn once: nobody knows when it came there
        [*STANDS, *_steps(21)[20:]],  # the step was logged
    ],
    ids=["slow", "moved", "ended", "young", "anew", "once", "logged"],
)
def test_bars_that_move_or_are_young_stand_for_nothing(lines: list[str], tmp_path: Path) -> None:
    assert diagnose(load(str(_ended(tmp_path, lines)))).findings == ()


TALKS_ON = _again(lambda i: f"10.0.0.3:{45000 + i} GET /health 200 OK", count=100)
DRAWN = [_bar(20, 64, 1), _bar(52, 64, 2), _bar(61, 64, 4)]


@pytest.mark.parametrize(
    ("bars", "after", "rule"),
    [
        (DRAWN, TALKS_ON, "buffer_never_fills"),
        (DRAWN, TALKS_ON[:8], None),
        (DRAWN, TALKS_ON[::33], None),
        ([*DRAWN, _bar(64, 64, 5)], TALKS_ON, None),
        (DRAWN[:1], TALKS_ON, None),
        ([*DRAWN, _bar(1, 64, 0)], TALKS_ON, None),
    ],
    ids=["hours", "minutes", "four lines", "it came to its end", "drawn once", "begun anew"],
)
def test_a_bar_that_is_drawn_no_more_while_others_talk_on_stands_still(
    bars: list[str], after: list[str], rule: str | None, tmp_path: Path
) -> None:
    found = diagnose(load(str(_ended(tmp_path, [*bars, *after])))).findings
    assert [f.rule for f in found] == ([rule] if rule else [])


def _counted(says: Callable[[int], str], *seconds: int) -> list[str]:
    """Lines without stamps that count the seconds themselves."""
    return [f"(TaskRunner pid=81) {says(passed)}" for passed in seconds]


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        (
            _counted(
                lambda s: f"[Buffer] waiting for samples: 61/64 groups ready, waited {s} s", 60, 300, 1800
            ),
            "buffer_never_fills",
        ),
        (
            [
                f"[rank{r}]: no progress on work 91 (ALLREDUCE) for {s} s"
                for s in (300, 900)
                for r in range(4)
            ],
            "collective_hang",
        ),
        (
            [
                *_counted(
                    lambda s: f"[hb] phase=sync elapsed={s}s: broadcast entered by 7/8 ranks", 600, 1200
                ),
                "Received SIGTERM, shutting down",
            ],
            "collective_hang",
        ),
        (
            [
                *_counted(lambda s: f"no progress on work 91 (_ALLGATHER_BASE) for {s} s", 120, 300),
                *_counted(lambda s: f"[watchdog] no step finished for {s} s", 1800, 3600),
            ],
            "collective_hang",
        ),
        (
            [
                f"reward server has not answered yet, elapsed 00:{m}:00 [repeated {m}x across cluster]"
                for m in (10, 40)
            ],
            "run_stopped",
        ),
    ],
    ids=["waited", "of ranks", "killed from outside", "a watchdog beside it", "by a clock"],
)
def test_a_line_that_counts_its_seconds_needs_no_stamp(lines: list[str], rule: str, tmp_path: Path) -> None:
    diagnosis = diagnose(load(str(_ended(tmp_path, lines))))
    assert diagnosis.verdict == rule
    assert len(diagnosis.findings) == 1


def test_what_can_never_come_is_told_however_slow_the_steps_are(tmp_path: Path) -> None:
    says = "[Buffer] waiting for samples: 61/64 groups ready, {} in flight, waited {} s"
    log = tmp_path / "run.log"
    steps = [line.replace(f"timing_s/step:{STEP_S}", "timing_s/step:900") for line in _steps()]
    found = {}
    for in_flight in (0, 3):
        waits = [says.format(in_flight, seconds) for seconds in (60, 300, 1200)]
        log.write_text("\n".join([*steps, *waits]) + "\n", encoding="utf-8")
        found[in_flight] = diagnose(load(str(log))).verdict
    assert found == {0: "buffer_never_fills", 3: "not_judged"}


@pytest.mark.parametrize(
    "lines",
    [
        [f"[hb] phase=generate elapsed={s}s: {s // 10}/400 responses finished" for s in range(60, 3600, 60)],
        [f"[rank{r}]: shard {r} of the checkpoint saved in {300 + 400 * r} s" for r in range(4)],
        ["[Buffer] waiting for samples: 61/64 groups ready, waited 60 s"] * 4,
        [f"[monitor] engine idle 0 %, waited for requests {90_000 + 60 * i} s" for i in range(4)],
        [
            *_counted(lambda s: f"waiting for samples: 61/64 groups ready, waited {s} s", 60, 1800),
            *(f"micro batch {i} of 64: loss 0.1" for i in range(64)),
        ],
        _counted(lambda s: f"waiting for samples: 61/64 groups ready, waited {s} s", 60, 300),
    ],
    ids=[
        "it moves",
        "what took long is done",
        "three waits",
        "counted since long before",
        "it went on",
        "not long",
    ],
)
def test_counted_seconds_of_what_goes_on_raise_no_alarm(lines: list[str], tmp_path: Path) -> None:
    assert diagnose(load(str(_ended(tmp_path, lines)))).findings == ()


@pytest.mark.parametrize("by", ["waits", "counts"])
def test_what_was_lost_before_the_log_stood_still_dates_it(by: str, tmp_path: Path) -> None:
    """Slots are lost from step 21 on; at last the batch never fills."""
    log = tmp_path / "run.log"
    steps = []
    for i in range(1, 41):
        wait = 1.0 + 0.02 * (i % 5) + 3.0 * max(0, i - 20) * (by == "waits")
        steps.append(
            f"(TaskRunner pid=81) step:{i} - critic/rewards/mean:{0.4 + 0.001 * i} - response_length/mean:800.0 - "
            f"fully_async/count/current_param_version:{i} - timing_s/gen:{wait} - timing_s/step:{10 + wait}"
            + (
                f" - buffer/in_flight_groups:{140 - 6 * max(0, i - 20)} - buffer/submitted_groups:140"
                * (by == "counts")
            )
        )
    waits = _counted(lambda s: f"[buffer] 61/64 groups ready, in flight 0, waited {s} s", 60, 600, 3600)
    log.write_text("\n".join([*steps, *waits]) + "\n", encoding="utf-8")
    (found,) = diagnose(load(str(log))).findings
    assert found.rule == "buffer_never_fills"
    assert 20 <= found.step <= 24
    assert "waited 3600 s" in found.evidence[0].says


@pytest.mark.parametrize(("saved_s", "is_found"), [(20.0, True), (700.0, False)])
def test_what_took_as_long_before_stands_for_nothing(saved_s: float, is_found: bool, tmp_path: Path) -> None:
    """Every fifth step is saved, for twelve minutes or in no time; the log is read while the next one is."""
    log = tmp_path / "run.log"
    steps = [
        f"{line} - timing_s/save_checkpoint:{saved_s if i % 5 == 4 else 0}" for i, line in enumerate(_steps())
    ]
    saves = _counted(lambda s: f"saving the checkpoint, elapsed={s}s", 60, 300, 900)
    log.write_text("\n".join([*steps, *saves]) + "\n", encoding="utf-8")
    assert bool(diagnose(load(str(log))).findings) is is_found
