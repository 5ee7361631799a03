"""Measured lengths are the whole workload: generation, forwards, training and simulation see the same ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollbook.cli.main import main
from rollbook.ledger.workload import Workload

MODEL = ["--model", "qwen3-0.6b", "--num-gpus", "8", "--prompts", "16", "--group-size", "4"]


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    captured = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


def planned(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    code, out, err = run(capsys, "plan", *MODEL, *args, "--json")
    assert code == 0, err
    data: dict[str, Any] = json.loads(out)
    return data


def written(folder: Path, *lengths: int) -> str:
    path = folder / "lengths.txt"
    path.write_text("\n".join(map(str, lengths)))
    return str(path)


def test_the_mean_of_a_workload_is_that_of_its_samples() -> None:
    """100, 200 and 900 cut at 300: a mean of 200."""
    work = Workload(
        num_prompts=1, group_size=2, prompt_tokens=10, response_tokens=64, max_response_tokens=300,
        length_samples=(100.0, 200.0, 900.0),
    )  # fmt: skip
    assert work.response_tokens == 200.0
    assert work.trained_tokens == 2 * 210.0
    assert work.length_sigma == work.lengths().sigma
    assert replace(work, length_samples=(50.0,)).response_tokens == 50.0


@pytest.mark.parametrize("assume", ["default", "paper"])
@pytest.mark.parametrize("stage", ["generate_throughput", "forward", "train"])
def test_lengths_that_all_equal_plan_as_their_mean(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, assume: str, stage: str
) -> None:
    words = ["--assume", assume, "--max-response-tokens", "512"]
    measured = planned(capsys, *words, "--lengths", written(tmp_path, *[512] * 4))
    described = planned(capsys, *words, "--response-tokens", "512")
    got, want = (data["step"]["seconds"][stage] for data in (measured, described))
    assert got == pytest.approx(want)
    assert measured["workload"]["response_tokens"] == 512


def test_a_simulation_trains_what_it_samples(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = [*MODEL, "--mode", "sync", "--json"]
    _, out, _ = run(capsys, "simulate", *args, "--lengths", written(tmp_path, 512, 512))
    _, told, _ = run(capsys, "simulate", *args, "--response-tokens", "512", "--max-response-tokens", "512")
    assert json.loads(out)["step_s"] == pytest.approx(json.loads(told)["step_s"])


def test_without_a_limit_the_longest_is_the_limit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = planned(capsys, "--lengths", written(tmp_path, 100, 700))
    assert data["workload"]["max_response_tokens"] == 700
    assert data["workload"]["num_length_samples"] == 2
    code, out, _ = run(capsys, "plan", *MODEL, "--lengths", written(tmp_path, 100, 700))
    assert code == 0 and "1024 + 400 tokens on average of 2 measured lengths" in " ".join(out.split())


def test_what_passes_the_limit_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path, 100, 700, 90_000)
    data = planned(capsys, "--lengths", path, "--max-response-tokens", "800")
    assert any("1 of 3 measured lengths pass the limit of 800" in note for note in data["warnings"])
    code, _, err = run(capsys, "plan", *MODEL, "--lengths", path)
    assert code == 2 and "beyond the 40960" in err and "where longer ones are then cut" in err


def test_the_paper_account_says_what_it_has_no_term_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    paper = ["--assume", "paper"]
    for words in (
        ["--lengths", written(tmp_path, 100, 700)],
        ["--rollout-dtype", "float8"],
        ["--recompute", "full"],
    ):
        assert any("has no term for" in note for note in planned(capsys, *paper, *words)["warnings"])
    assert not any("has no term for" in note for note in planned(capsys, *paper)["warnings"])


@pytest.mark.parametrize("words", [["--response-tokens", "300"], ["--length-sigma", "0.9"]])
def test_a_mean_beside_measured_lengths_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str]
) -> None:
    code, out, err = run(capsys, "plan", *MODEL, "--lengths", written(tmp_path, 100), *words)
    assert (code, out) == (2, "") and words[0] in err and "which measured it" in err


def test_a_described_workload_may_name_a_file_of_lengths(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    workload = tmp_path / "workload.toml"
    workload.write_text(
        f'model = "qwen3-0.6b"\nlengths = "{written(tmp_path, 100, 300)}"\nmax_response_tokens = 512\n'
    )
    log = tmp_path / "log.jsonl"
    values = {"timing_s/step": 5.0, "timing_s/gen": 4.0, "response_length/mean": 900.0}
    log.write_text("".join(json.dumps({"step": i, "data": values}) + "\n" for i in range(3)))
    code, _, err = run(capsys, "reconcile", str(log), "--workload", str(workload), "--json")
    assert code == 0, err
