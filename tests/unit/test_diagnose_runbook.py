"""The duty manual of a job: its own numbers, every fault of the tree, and what was expected of each stage."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rollbook.cli.main import main
from rollbook.diagnose.manual import ENTRIES
from rollbook.diagnose.tree import AREAS, RULES
from rollbook.drill.faults import FAULTS

ADDITION = str(Path(__file__).parents[2] / "examples" / "addition.toml")


def manual(capsys: pytest.CaptureFixture[str], *args: str, is_named: bool = True) -> str:
    """The manual as printed; for a named device, so that nothing is measured."""
    if is_named and "--gpu" not in args:
        args = (*args, "--gpu", "H100")
    with pytest.raises(SystemExit) as ended:
        main(["runbook", *args])
    captured = capsys.readouterr()
    assert ended.value.code in (0, None), captured.err
    return captured.out


def test_every_rule_has_its_row_in_the_order_of_the_tree() -> None:
    assert list(ENTRIES) and set(ENTRIES) == set(RULES)
    areas = [AREAS.index(entry.area) for entry in ENTRIES.values()]
    assert areas == sorted(areas)


def test_the_manual_holds_this_jobs_thresholds(capsys: pytest.CaptureFixture[str]) -> None:
    """separate_async with a bound of 3 steps: in the signals, the tree, the alerts and the commands."""
    text = manual(
        capsys, ADDITION, "--set", "run.schedule=separate_async", "--set", "buffer.max_staleness_steps=3"
    )
    assert "staleness at most 3" in text
    assert "`trajectory_staleness_worst/max` near 3" in text
    assert "rollbook_training_off_policy_trajectory_staleness_worst_max > 3" in text
    assert "--max-staleness-steps 3" in text
    assert not re.search(r"\{\w+\}", re.sub(r"`[^`]*`", "", text)), "a placeholder was not filled in"
    assert all(f"`{rule}`" in text for rule in RULES)


def test_the_manuals_commands_do_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules it names are the conditions it prints, for a float32 job too; the drill is one there is."""
    monkeypatch.chdir(tmp_path)
    text = manual(capsys, ADDITION)
    printed = set(re.findall(r"^\| \w+ \| (?:page|ticket) \| `(.*?)` \|", text, re.MULTILINE))
    (rules,) = re.findall(r"`rollbook (alerts [^`]*)`", text)
    with pytest.raises(SystemExit):
        main(rules.split())
    written = (tmp_path / "alerts" / "rollbook.rules.yml").read_text()
    exprs = {json.loads(expr) for expr in re.findall(r"expr: (.*)", written)}
    assert printed and printed <= exprs
    assert re.findall(r"`rollbook drill (\w+) ", text)[0] in FAULTS


@pytest.mark.parametrize(
    ("every_steps", "says"), [(0, "after the last step and on Ctrl-C"), (40, "every 40 steps")]
)
def test_the_manual_says_when_a_state_is_saved(
    every_steps: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = manual(capsys, ADDITION, "--set", f"checkpoint.every_steps={every_steps}")
    assert f"| checkpoints | {says}" in text


@pytest.mark.parametrize(("drops", "is_listed"), [(True, True), (False, False)])
def test_the_alert_of_a_starved_filter_stands_where_a_filter_drops_groups(
    capsys: pytest.CaptureFixture[str], drops: bool, is_listed: bool
) -> None:
    """Whatever the algorithm is called: GRPO with drop_flat is starved as DAPO is."""
    text = manual(capsys, ADDITION, "--set", f"algorithm.filter.drop_flat={str(drops).lower()}")
    assert ("FilterStarvation" in text) == is_listed


def test_a_bound_of_zero_is_broken_by_any_stale_sample(capsys: pytest.CaptureFixture[str]) -> None:
    text = manual(capsys, ADDITION, "--set", "run.schedule=sync")
    assert "`trajectory_staleness_worst/max` above 0 in any step" in text


def test_the_record_holds_the_plan_of_a_run_that_has_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(Path(ADDITION).read_text())
    stage = {
        "seconds": 1.25,
        "low": 1.0,
        "high": 1.5,
        "formula": "6 N tokens / rate",
        "source": "calibration",
    }
    (run / "plan.json").write_text(
        json.dumps({"stages": {"train": stage, "rollout": {**stage, "seconds": 2.0}}})
    )
    text = manual(capsys, str(run), is_named=False)
    assert "| train | 1.25 | 1 to 1.5 | 6 N tokens / rate | calibration |" in text
    assert "| together | 3.25 |" in text
    assert f"rollbook train --resume {run}" in text


def test_the_page_holds_the_same_tables_and_nothing_from_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "manual.html"
    out = tmp_path / "manual.md"
    assert manual(capsys, ADDITION, "-o", str(out), "--html", str(page)) == ""
    text, markdown = page.read_text(), out.read_text()
    assert text.count("<tr>") == sum(
        line.startswith("|") and "---" not in line for line in markdown.splitlines()
    )
    assert not re.search(r"https?://|<script|src=", text)


def test_a_config_that_cannot_run_is_refused_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["runbook", ADDITION, "--set", "buffer.max_staleness_steps=2"])
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert "a synchronous run is on-policy" in captured.err


def test_before_the_run_the_record_is_derived_from_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    """Six steps, the stages of the job's own schedule on the named devices, and what was assumed."""
    where = ["--gpu", "H100", "--num-gpus", "8"]
    text = manual(capsys, ADDITION, "--set", "plan.response_tokens=4", *where)
    assert "Derived from the config for 8 x H100" in text
    assert [f"### Step {n}." in text for n in range(1, 8)] == [True] * 6 + [False]
    assert "samples 1,024 responses (4,096 tokens)" in text
    record = text.split("## Derivation record")[1].split("## The four signals")[0]
    for stage in ("rollout", "train", "sync", "the step, sync"):
        assert re.search(rf"^\| {stage} \| [\d.e-]+ \|", record, re.MULTILINE), stage


def test_a_model_beside_the_config_is_found_from_any_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    shape |= {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512, "model_type": "llama"}
    (tmp_path / "there" / "tiny").mkdir(parents=True)
    (tmp_path / "there" / "tiny" / "config.json").write_text(json.dumps(shape))
    config = tmp_path / "there" / "mine.toml"
    (tmp_path / "there" / "sums.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n' * 8)
    config.write_text(
        '[run]\nname = "mine"\nnum_steps = 8\ngroups_per_step = 4\n[model]\npath = "tiny"\n[rollout]\ngroup_size = 4\n'
        'max_response_tokens = 32\n[[data.sources]]\nname = "sums"\npath = "sums.jsonl"\n'
        '[[reward.terms]]\nfunction = "exact"\n'
    )
    monkeypatch.chdir(tmp_path)
    text = manual(capsys, str(config))
    assert str(tmp_path / "there" / "tiny") in text


def test_a_job_whose_device_is_not_here_has_a_manual_that_says_how_to_derive_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    on_gpu = ["--set", "model.device=cuda", "--set", "rollout.device=cuda", "--set", f"run.dir={tmp_path}"]
    text = manual(capsys, ADDITION, *on_gpu, is_named=False)
    record = text.split("## Derivation record")[1].split("## The four signals")[0]
    assert "name it with --gpu" in record
    assert "Derived from the config for 1 x H100" in manual(capsys, ADDITION, *on_gpu, "--gpu", "H100")


def test_a_named_device_is_used_for_a_config_whose_run_has_begun_and_refused_for_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "addition"
    run.mkdir()
    (run / "config.toml").write_text(Path(ADDITION).read_text())
    (run / "plan.json").write_text(json.dumps({"stages": {}}))
    text = manual(capsys, ADDITION, "--set", f"run.dir={tmp_path}", "--gpu", "H100", "--num-gpus", "8")
    assert "8 x H100" in text
    for option in (("--gpu", "H100"), ("--num-gpus", "8")):
        with pytest.raises(SystemExit) as ended:
            main(["runbook", str(run), *option])
        assert ended.value.code == 2
        assert f"{option[0]} is given for {run}, which has begun" in capsys.readouterr().err
