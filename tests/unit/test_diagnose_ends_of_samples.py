"""A log of code that a model writes holds tracebacks of that code: they end no run. A run that says that it finished
has finished."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollbook.diagnose.finding import Diagnosis
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose

OF_A_TEXT = '  File "<string>", line 3, in <module>\n'
OF_A_FILE = '  File "/opt/train.py", line 88, in main\n'
HEAD = "Traceback (most recent call last):\n"


def _home(i: int) -> str:
    return f"step={i} reward={0.2 + 0.005 * i:.3f} kl={0.001 + i / 1e5} grad_norm=0.{3 + i % 3}\n"


def _verl(i: int) -> str:
    return f"(TaskRunner pid=7) step:{i} - critic/rewards/mean:{0.2 + 0.005 * i:.3f} - actor/grad_norm:0.{3 + i % 3}\n"


def _slime(i: int) -> str:
    return f"[2026-03-01 10:{i:02d}:11] rollout.py:301 - rollout {i}: {{'rollout/raw_reward': {0.2 + i / 200}}}\n"


FORMATS = {"home": _home, "verl": _verl, "slime": _slime}


def judged(tmp_path: Path, step: Callable[[int], str], end: str, between: str = "") -> Diagnosis:
    (tmp_path / "run.log").write_text("".join(step(i) + between for i in range(1, 41)) + end)
    return diagnose(load(str(tmp_path / "run.log")))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("between", ["", f"{HEAD}{OF_A_TEXT}ZeroDivisionError: division by zero\n"])
@pytest.mark.parametrize(
    "error", ["ZeroDivisionError: division by zero", "AssertionError", "MemoryError", "SyntaxError: x"]
)
def test_a_traceback_of_a_sampled_program_ends_no_run(
    format: str, between: str, error: str, tmp_path: Path
) -> None:
    end = f"sampled:\n{HEAD}{OF_A_TEXT}{error}\nscore: 0.0\n"
    assert judged(tmp_path, FORMATS[format], end, between).findings == ()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("frames", [OF_A_FILE, OF_A_TEXT + OF_A_FILE, OF_A_FILE + OF_A_TEXT])
@pytest.mark.parametrize("between", ["", f"{HEAD}{OF_A_TEXT}ValueError: 3 is no 4\n"])
def test_a_traceback_with_a_frame_in_a_file_is_the_runs_own(
    format: str, frames: str, between: str, tmp_path: Path
) -> None:
    """A spawned process begins in a text as well, and ends in files; the same words in a sample do not hide it."""
    diagnosis = judged(tmp_path, FORMATS[format], f"{HEAD}{frames}ValueError: 3 is no 4\n", between)
    assert diagnosis.verdict == "run_stopped"
    assert "3 is no 4" in diagnosis.findings[0].title


@pytest.mark.parametrize("format", FORMATS)
def test_an_error_that_every_step_got_over_ends_no_run(format: str, tmp_path: Path) -> None:
    """A judge that refuses a connection now and then does so after the last step as well."""
    refused = f"{HEAD}{OF_A_FILE}httpx.ConnectError: refused 12 of 64\n"
    assert judged(tmp_path, FORMATS[format], "", refused).findings == ()
    other = f"{HEAD}{OF_A_FILE}ValueError: 3 is no 4\n"
    assert judged(tmp_path, FORMATS[format], other, refused).verdict == "run_stopped"


def test_frames_seen_before_do_not_hide_the_end_of_an_ignored_exception(tmp_path: Path) -> None:
    own = f"{HEAD}{OF_A_FILE}    fit()\nValueError: 3 is no 4\n"
    ignored = (
        f'Exception ignored in: <f>\n{HEAD}  File "/opt/y.py", line 3, in g\n    h()\nTimeoutError: late\n'
    )
    assert "3 is no 4" in judged(tmp_path, _home, own + ignored).findings[0].title


def test_a_sample_after_the_runs_own_error_does_not_hide_it(tmp_path: Path) -> None:
    end = f"{HEAD}{OF_A_FILE}ValueError: 3 is no 4\n{HEAD}{OF_A_TEXT}KeyError: 'a'\n"
    assert "3 is no 4" in judged(tmp_path, _home, end).findings[0].title


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "says",
    [
        "Training finished",
        "training finished.",
        "Training completed in 3 h",
        "INFO training is done",
        "Finished training",
    ],
)
def test_a_run_that_says_that_it_finished_has_finished(format: str, says: str, tmp_path: Path) -> None:
    """What failed before that was got over."""
    end = f"{HEAD}{OF_A_FILE}ReadTimeout: judge\n{says}\n"
    assert judged(tmp_path, FORMATS[format], end).findings == ()


@pytest.mark.parametrize(
    "says", ["training finished with error code 1", "Training done for epoch 3", "training failed"]
)
def test_an_end_that_is_none_ends_nothing(says: str, tmp_path: Path) -> None:
    end = f"{HEAD}{OF_A_FILE}ValueError: 3 is no 4\n{says}\n"
    assert judged(tmp_path, _home, end).verdict == "run_stopped"
