"""The demo: one command that plans, trains and reconciles."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from rollbook.cli.demo import command

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_runs_the_example_as_it_stands() -> None:
    packaged = resources.files("rollbook.cli").joinpath("reverse.toml").read_text(encoding="utf-8")
    assert packaged == (ROOT / "examples" / "reverse.toml").read_text(encoding="utf-8")


def test_it_ends_with_the_account_and_the_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["run.num_steps=1", "run.groups_per_step=8", "warmup.num_updates=2", "eval.num_prompts=4"]
    command(dir=tmp_path, set_=[*small, "trainer.num_mini_batches=1", "observe.terminal='off'"])
    printed = capsys.readouterr().out
    for stage in ("rollout", "train", "sync"):
        assert stage in printed
    assert "planned" in printed
    assert f"rollbook watch {tmp_path / 'reverse'}" in printed
    assert (tmp_path / "reverse" / "plan.json").is_file()
    command(dir=tmp_path, set_=[*small, "trainer.num_mini_batches=1", "observe.terminal='off'"])
    assert (tmp_path / "reverse-2").is_dir()  # a second demo overwrites nothing
