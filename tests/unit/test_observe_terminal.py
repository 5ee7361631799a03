"""The terminal view: what a user sees at 80 and 120 columns, and without a terminal."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest
from rich.console import Console

from rollbook.observe.catalogue import STAGES
from rollbook.observe.clock import ManualClock
from rollbook.observe.recorder import Recorder
from rollbook.observe.terminal import TerminalView, sparkline, stage_bar
from rollbook.observe.values import Ratio


class Screen:
    """A run of a few steps drawn on a console of the given width."""

    def __init__(self, folder: Path, width: int, *, is_terminal: bool = True) -> None:
        self.clock = ManualClock()
        self.out = io.StringIO()
        self.console = Console(width=width, file=self.out, force_terminal=is_terminal, color_system=None)
        self.view = TerminalView(folder / "run", num_steps=10, console=self.console, clock=self.clock)
        self.view._live = None  # drawn by the test, not by a thread
        self.recorder = Recorder(folder / "run", [self.view], clock=self.clock, strict=True)

    def step(self, step: int, sources: tuple[str, ...] = ("addition",)) -> None:
        with self.recorder.step(step) as span:
            span.set(expected_s=3.0)
            with self.recorder.span("rollout", expected_s=2.5) as rollout:
                self.clock.advance(2.0)
                rollout.set(tokens=24_000)
            with self.recorder.span("train", expected_s=0.5):
                self.clock.advance(1.0)
            for source in sources:
                self.recorder.metrics({f"reward/{source}/mean": Ratio(step + 1, 10)})
            self.recorder.metrics(
                {
                    "response_length/mean": 5.25,
                    "response_length/max": 8.0,
                    "training/logprob_gap/mean": 3.1e-6,
                    "training/off_policy/trajectory_staleness_worst/max": 1.0,
                }
            )

    def draw(self) -> str:
        with self.console.capture() as capture:
            self.console.print(self.view.render())
        return capture.get()


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_fits_and_shows_plan_beside_measurement(tmp_path: Path, width: int) -> None:
    screen = Screen(tmp_path, width)
    for step in range(3):
        screen.step(step)
    text = screen.draw()
    assert {len(line) for line in text.splitlines()} == {width}
    for piece in (
        "step 2/10",
        "addition",
        "0.300",
        "▁▅█",
        "5.2 (max 8)",
        "12.0k tokens/s",
        "3.1e-06",
        "max 1",
    ):
        assert piece in text
    rollout = next(line for line in text.splitlines() if line.startswith("│ rollout"))
    assert rollout.split()[-6:] == ["2.00", "s", "2.50", "s", "0.80", "│"]
    whole = next(line for line in text.splitlines() if "whole step" in line)
    assert "1.00" in whole
    assert "about 21.0 s left" in text


def test_many_sources_share_a_row(tmp_path: Path) -> None:
    screen = Screen(tmp_path, 80)
    screen.step(0, ("a", "b", "c", "d", "a-very-long-name-of-a-data-source"))
    text = screen.draw()
    assert "and 2 more sources, from 0.100 to 0.100" in text
    assert {len(line) for line in text.splitlines()} == {80}


def test_a_stage_in_progress_shows_its_time_so_far(tmp_path: Path) -> None:
    screen = Screen(tmp_path, 80)
    screen.step(0)
    with screen.recorder.step(1), screen.recorder.span("train"):
        screen.clock.advance(7.0)
        line = next(line for line in screen.draw().splitlines() if line.startswith("│ train"))
    assert "7.00 s" in line
    assert "▶" in line


def test_before_the_first_step_it_says_what_is_going_on(tmp_path: Path) -> None:
    screen = Screen(tmp_path, 80)
    with screen.recorder.span("warmup"):
        screen.recorder.event("warmup", update=120, loss=1.25)
        screen.recorder.event("warmup_check", exact_match=[0.5, 0.75])
        assert "warm-up  update 120  loss 1.25  held-out 0.5" in screen.draw()
        assert "supervised warm-up on reference answers" in screen.draw()


def test_what_is_left_of_the_warm_up_counts_down_and_ends_with_it(tmp_path: Path) -> None:
    screen = Screen(tmp_path, 80)
    with screen.recorder.span("warmup"):
        screen.clock.advance(10.0)
        screen.recorder.event("warmup", update=10, num_updates=40, loss=1.25)
        assert "at most 30.0 s left" in screen.draw()
        screen.clock.advance(12.0)  # a check of held-out prompts
        assert "at most 18.0 s left" in screen.draw()
    screen.clock.advance(50.0)
    assert "warm-up  update 10/40" in screen.draw()
    assert "s left" not in screen.draw()


def test_the_parts_of_a_calibration_are_said(tmp_path: Path) -> None:
    for is_terminal in (True, False):
        screen = Screen(tmp_path / str(is_terminal), 120, is_terminal=is_terminal)
        with screen.recorder.span("plan"):
            screen.recorder.event("measuring", what="decode steps and prefills", part=3, num_parts=7)
            said = screen.draw() if is_terminal else screen.out.getvalue()
            assert "3/7 decode steps and prefills" in said


def test_the_panel_may_be_drawn_while_readings_arrive(tmp_path: Path) -> None:
    """The live panel has a thread of its own."""
    screen = Screen(tmp_path, 80)
    errors: list[BaseException] = []
    ends = threading.Event()

    def draw() -> None:
        while not ends.is_set():
            try:
                screen.view.render()
            except BaseException as error:
                errors.append(error)
                return

    thread = threading.Thread(target=draw)
    thread.start()
    for step in range(30):
        screen.step(step, tuple(f"source-{step}-{i}" for i in range(5)))
    ends.set()
    thread.join()
    assert errors == []


def test_without_a_terminal_it_prints_one_line_a_step(tmp_path: Path) -> None:
    screen = Screen(tmp_path, 80, is_terminal=False)
    screen.step(0)
    screen.step(1)
    assert screen.out.getvalue().splitlines() == [
        f"run {tmp_path / 'run'}",
        "step 0/10  reward 0.100  length 5.25  3/3 s  rollout 2/2.5  train 1/0.5  tok/s 12.0k  gap 3.1e-06  stale 1",
        "step 1/10  reward 0.200  length 5.25  3/3 s  rollout 2/2.5  train 1/0.5  tok/s 12.0k  gap 3.1e-06  stale 1",
    ]


def test_a_line_keeps_what_matters_most_within_120_characters(tmp_path: Path) -> None:
    """However many stages and sources a step has."""
    view = Screen(tmp_path, 80, is_terminal=False).view
    data = {f"reward/a-long-name-of-source-{n}/mean": n / 10 for n in range(9)}
    data |= {f"timing_s/{suffix}": 123.456 for suffix in STAGES.values()} | {"timing_s/step": 1234.5}
    data |= {f"expected_s/{suffix}": 119.876 for suffix in STAGES.values()} | {"expected_s/step": 1198.7}
    data |= {"response_length/mean": 812.25, "training/logprob_gap/mean": 1e-7, "perf/tokens_per_s/gen": 1e6}
    line = view.line(1234, data)
    assert len(line) <= 120
    assert line.startswith("step 1234/10  reward 0.000 to 0.800 of 9 sources  length 812  1234/1199 s  ")
    two = {
        "reward/maths/mean": 0.25,
        "reward/code/mean": 0.5,
        "timing_s/step": 1.0,
        "val/code/exact_match": 0.75,
    }
    assert view.line(3, two) == "step 3/10  reward maths 0.250 code 0.500  1 s  held-out code 0.750"
    assert view.line(0, {"val/code/exact_match": 0.75}) == "before step 0  held-out code 0.750"


def test_what_happens_before_the_first_step_is_said_as_it_begins(tmp_path: Path) -> None:
    screen = Screen(tmp_path, 80, is_terminal=False)
    recorder = screen.recorder
    with recorder.span("model"), recorder.span("inside the model"):
        pass
    with recorder.span("warmup"):
        for update in range(1, 5):
            screen.clock.advance(2.0)
            recorder.event("warmup", update=update, num_updates=40, loss=1.25)
    recorder.event(
        "plan",
        topology="sync: 1 engine",
        stages={"train": 0.5, "rollout": 2.5, "eval": 0.25},
        step_s=3.0,
        total_s=32.5,
    )
    screen.step(0)
    with recorder.step(1), recorder.span("eval"):
        pass  # within the steps the line of the step says it
    assert screen.out.getvalue().splitlines()[:-2] == [
        f"run {tmp_path / 'run'}",
        "  making the model and its optimizer",
        "  supervised warm-up on reference answers",
        "  warm-up  update 1/40  loss 1.25  at most 78.0 s left",
        "  warm-up  update 4/40  loss 1.25  at most 72.0 s left",
        "plan     sync: 1 engine",
        "         a step takes 3.00 s, all that are left 32.5 s; mean seconds by stage (below: measured/planned):",
        "         rollout 2.5  train 0.5  eval 0.25",
    ]


def test_findings_are_said_aloud_with_their_remedy(tmp_path: Path) -> None:
    screen = Screen(tmp_path, 80, is_terminal=False)
    screen.recorder.finding("version_drift", "replica 1 serves version 3, not 4", remedy="restart replica 1")
    assert screen.out.getvalue().endswith(
        "\nfinding: replica 1 serves version 3, not 4\n  hint: restart replica 1\n"
    )


def test_a_replica_that_leaves_and_comes_back_is_named(tmp_path: Path) -> None:
    screen = Screen(tmp_path, 120, is_terminal=False)
    screen.recorder.event("quarantined", replica_id=1, why="its process is gone")
    screen.recorder.event("back_in_service", replica_id=1)
    assert screen.out.getvalue().splitlines()[1:] == [
        "quarantined: replica 1: its process is gone",
        "back in service: replica 1",
    ]


def test_a_notice_is_one_line_in_a_log_and_a_finished_run_taken_up_again_has_no_summary(
    tmp_path: Path,
) -> None:
    screen = Screen(tmp_path, 80, is_terminal=False)
    summary = "all 64 rewards of the first 8 groups are 0: " + "there is nothing to learn from " * 4
    screen.recorder.finding("one_reward", summary, remedy="look at some responses")
    screen.recorder.event("already_complete", num_steps_done=3)
    screen.recorder.close()
    assert screen.out.getvalue().splitlines() == [
        f"run {tmp_path / 'run'}",
        f"finding: {summary}".rstrip(),
        "  hint: look at some responses",
    ]


def test_the_summary_says_how_far_it_came_and_where_it_lies(tmp_path: Path) -> None:
    screen = Screen(tmp_path, 200, is_terminal=False)
    for step in range(2):
        screen.step(step)
    screen.out.truncate(0)
    screen.out.seek(0)
    screen.recorder.close()
    assert screen.out.getvalue() == ("2 steps in 6.00 s\n  reward of addition: 0.100 -> 0.200\n")


def test_the_seconds_of_the_summary_are_those_of_the_steps_and_the_calibration_stands_beside(
    tmp_path: Path,
) -> None:
    screen = Screen(tmp_path, 200, is_terminal=False)
    screen.clock.advance(35.0)
    for step in range(2):
        screen.step(step)
    screen.recorder.close()
    assert "2 steps in 6.00 s, after 35.0 s of preparation\n" in screen.out.getvalue()


def test_a_long_history_keeps_the_sparkline_in_its_width() -> None:
    assert len(sparkline([float(i % 7) for i in range(1000)], 31)) == 31
    assert sparkline([2.0, 2.0], 10) == "▁▁"


def test_a_bar_never_leaves_its_width() -> None:
    assert stage_bar(9.0, 12.0, 10.0, 12, "").cell_len == 12
    assert stage_bar(0.0, None, 0.0, 5, "").plain == "     "
