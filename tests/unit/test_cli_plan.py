"""`rollbook plan` and `rollbook simulate` as a user meets them: keys, columns, files, mistakes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rollbook.cli.main import main

PAPER_8B = [
    "--model", "Llama-3-8B", "--gpu", "H100", "--num-gpus", "16", "--prompts", "512", "--group-size", "8",
    "--prompt-tokens", "300", "--response-tokens", "1024", "--max-response-tokens", "4096", "--assume", "paper",
]  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command line."""
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    captured = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


def test_json_has_the_fixed_keys(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "plan", *PAPER_8B, "--json")
    assert (code, err) == (0, "")
    data: dict[str, Any] = json.loads(out)
    assert {
        "workload", "model", "cluster", "assumptions", "step", "topologies", "recommendation", "waterfall",
        "derivation",
    } <= set(data)  # fmt: skip
    step = data["step"]
    assert set(step["flops"]) >= {
        "generate", "prefill", "reference", "proximal", "reward_model", "train", "critic", "total",
    }  # fmt: skip
    assert set(step["seconds"]) >= {
        "generate_throughput", "generate_tail", "prefill", "forward", "train", "switch", "sync", "total",
    }  # fmt: skip
    assert set(step["decode"]) >= {
        "num_replicas", "slots_per_replica", "num_waves", "decode_step_s", "tokens_per_s_per_gpu", "mfu_frac",
    }  # fmt: skip
    assert set(step["memory"]) >= {
        "weights_bytes", "train_state_bytes", "train_state_bytes_per_gpu", "reference_bytes_per_gpu",
        "rollout_weights_bytes_per_gpu", "kv_bytes_per_token", "kv_total_bytes",
    }  # fmt: skip
    for topology in data["topologies"]:
        assert {"mode", "num_rollout_gpus", "num_train_gpus", "step_s", "mfu_frac", "fits", "why_not"} <= set(
            topology
        )
        assert set(topology["idle_frac"]) == {"rollout", "train"}
        assert topology["fits"] == (topology["why_not"] == [])
    assert [d["step"] for d in data["derivation"]] == [1, 2, 3, 4, 5, 6]
    for derived in data["derivation"]:
        assert {"title", "inputs", "outputs", "because"} <= set(derived)
    losses = sum(loss["frac"] for loss in data["waterfall"])
    assert losses + step["mfu_frac"] == pytest.approx(1.0)
    assert step["seconds"]["total"] == pytest.approx(111.3, abs=0.06)
    assert step["mfu_frac"] == pytest.approx(0.287, abs=0.0006)


@pytest.mark.parametrize("staleness", ["0", "4"])
def test_json_says_of_which_topology_a_step_and_a_waterfall_are(
    capsys: pytest.CaptureFixture[str], staleness: str
) -> None:
    """The ones at the top are of the colocated synchronous step, whatever is recommended."""
    _, out, _ = run(
        capsys, "plan", "--model", "qwen3-32b", "--num-gpus", "128", "--response-tokens", "8k",
        "--max-response-tokens", "32k", "--max-staleness", staleness, "--json",
    )  # fmt: skip
    data = json.loads(out)
    best = data["recommendation"]
    assert (best["mode"] == "sync") == (staleness == "0")
    for told, mode in ((data, "sync"), (best, best["mode"])):
        assert told["step"]["mode"] == mode
        assert told["step"]["is_recommended"] == (mode == best["mode"])
        assert {loss["mode"] for loss in told["waterfall"]} == {mode}
        assert {loss["topology"] for loss in told["waterfall"]} == {told["step"]["topology"]}
    assert data["step"]["topology"] == "colocated, synchronous, 128 shared"
    assert best["step"]["topology"] == best["title"]


def test_counts_may_be_written_as_people_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(
        capsys, "plan", "--model", "qwen3-8b", "--num-gpus", "8", "--response-tokens", "2k",
        "--max-response-tokens", "8k", "--json",
    )  # fmt: skip
    workload = json.loads(out)["workload"]
    assert (workload["response_tokens"], workload["max_response_tokens"]) == (2048, 8192)


def test_the_printed_plan_is_readable_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, "plan", "--model", "deepseek-v3", "--num-gpus", "512", "--response-tokens", "8k")
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
    for title in ("Recommendation", "Topologies, fastest first", "Where the peak goes", "What if"):
        assert title in out
    assert "…" not in out  # nothing is cut off


def test_planning_imports_no_torch() -> None:
    import subprocess

    code = (
        "import sys; from rollbook.cli.main import main\n"
        "try: main(['plan', '--model', 'qwen3-8b', '--json'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'ray', 'pyarrow'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("args", "what", "hint"),
    [
        (["--model", "qwen3-9b"], "model 'qwen3-9b'", "did you mean"),
        (["--model", "qwen3-8b", "--gpu", "H10O"], "'H10O'", "did you mean"),
        (["--model", "qwen3-8b", "--num-gpus", "0"], "below 1", "at least 1"),
        (["--model", "qwen3-8b", "--prompts", "-4"], "below 1", "at least 1"),
        (["--model", "qwen3-8b", "--response-tokens", "many"], "not a number", "such as 4096"),
        (["--model", "qwen3-8b", "--group-size", "1"], "--group-size is 1", "--group-size of at least 2"),
        (["--model", "qwen3-8b", "--max-response-tokens", "64k"], "beyond the 40960", "--max-context"),
        (["--model", "qwen3-8b", "--num-gpus", "20"], "not whole nodes", "--num-gpus 16 or 24"),
        (
            ["--model", "qwen3-8b", "--num-gpus", "16", "--rollout-tp", "3"],
            "does not divide",
            "--rollout-tp 2 or 4",
        ),
        (["--model", "qwen3-8b", "--algorithm", "gppo"], "'gppo'", "did you mean"),
        (["--model", "qwen3-8b", "--reward", "sandbx"], "'sandbx'", "did you mean 'sandbox'"),
        (["--model", "qwen3-8b", "--emit", "verl2"], "'verl2'", "did you mean 'verl'"),
        (["--model", "qwen3-8b", "--assume", "papr"], "'papr'", "paper"),
        (["--model", "qwen3-8b", "--split", "4;4"], "'4;4'", "40:24"),
        (["--model", "no/such/config.json"], "no/such/config.json", "config.json"),
        (["--model", ""], "no model is named", "config.json"),
        (["--model", "hf/none"], "no folder 'hf/none'", "names such as qwen3-8b"),
        (["--model", "qwen3-8b", "--num-gpus", "8.5"], "is 8.5, not whole", "whole number"),
        (["--model", "qwen3-8b", "--num-gpus", "1e6"], "is 1000000, above 131072", "at most 131,072"),
        (["--model", "qwen3-8b", "--observation-tokens", "4k"], "with one turn", "--turns of 2"),
        (["--model", "qwen3-8b", "--env-seconds", "30"], "with one turn", "--turns of 2"),
        (["--model", "qwen3-8b", "--lose-prefix"], "--lose-prefix with one turn", "--turns of 2"),
        (["--model", "qwen3-8b", "--turns", "3"], "--turns is 3 and the environment", "--env-seconds or"),
        (
            ["--model", "qwen3-8b", "--turns", "2", "--env-p99-seconds", "5"],
            "without --env-seconds",
            "the mean",
        ),
        (["--model", "qwen3-8b", "--json", "--emit", "verl"], "--json beside --emit", "leave one"),
        (["--model", "qwen3-8b", "--json", "--top", "3"], "--top is 3", "leave out"),
        (
            ["--model", "qwen3-8b", "--prompts", "1", "--mini-batches", "17"],
            "17 mini batches of 16 sequences",
            "at most 16",
        ),
        (["--model", "qwen3-8b", "--prompt-tokens", "1m"], "a prompt of 1000000", "lower --prompt-tokens"),
        (
            ["--model", "qwen3-8b", "--max-context", "2k"],
            "beyond the 2048 of --max-context",
            "raise --max-context",
        ),
        (
            ["--model", "qwen3-8b", "--turns", "5000", "--env-seconds", "10"],
            "--turns is 5000",
            "of at most 4096",
        ),
    ],
)
def test_a_mistake_is_told_with_a_remedy_and_no_traceback(
    capsys: pytest.CaptureFixture[str], args: list[str], what: str, hint: str
) -> None:
    code, out, err = run(capsys, "plan", *args)
    assert (code, out) == (2, "")
    error, remedy = err.rstrip().split("\nhint: ")
    assert error.startswith("error: ") and what in error
    assert hint in remedy
    assert "Traceback" not in err


def test_what_an_unknown_architecture_was_taken_for_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = {
        "model_type": "novelformer", "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 16,
        "vocab_size": 50000, "max_position_embeddings": 32768,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    code, out, _ = run(capsys, "plan", "--model", str(path), "--num-gpus", "8")
    assert code == 0
    assert "note:" in out and "novelformer" in out and "num_key_value_heads is absent" in out


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_gpus_that_a_split_leaves_without_work_are_told(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    told = "".join(run(capsys, command, *SMALL, "--split", "4:3")[1:])
    assert "the split 4:3 leaves 1 GPU without work" in " ".join(told.split())
    assert "without work" not in "".join(run(capsys, command, *SMALL, "--split", "4:4")[1:])


def test_a_plan_that_fits_nowhere_is_an_answer_but_cannot_be_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    impossible = ["plan", "--model", "deepseek-v3", "--num-gpus", "8", "--offload", "none"]
    code, out, _ = run(capsys, *impossible)
    assert code == 1 and "Nothing fits" in out and "Any one of these would make it fit" in out
    for seconds_of_no_step in ("One step", "Topologies", "Beside the step", "Where the peak goes", "TP"):
        assert seconds_of_no_step not in out
    assert run(capsys, *impossible, "--json")[0] == 1
    target = tmp_path / "run.toml"
    code, _, err = run(capsys, *impossible, "-o", str(target))
    assert code == 2 and "no topology fits" in err and "GPUs instead of 8" in err
    assert not target.exists()


def test_files_are_written_and_named_on_stderr(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    toml, page = tmp_path / "run.toml", tmp_path / "report.html"
    code, _, err = run(capsys, "plan", "--model", "qwen3-8b", "-o", str(toml), "--html", str(page), "--json")
    assert code == 0 and str(toml) in err and str(page) in err
    assert toml.read_text().startswith("# Qwen3-8B on 8 H100")
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("writes", "loop"),
    [
        (["-o", "run.toml"], "rollbook"),
        (["--emit", "kubernetes"], "rollbook"),
        (["--emit", "verl"], "verl"),
        (["--emit", "slime"], "slime"),
        (["--emit", "areal"], "default"),
        (["-o", "run.toml", "--emit", "verl"], "default"),
        (["-o", "run.toml", "--assume", "default"], "default"),
        ([], "default"),
    ],
)
def test_what_is_written_is_priced_as_the_loop_that_runs_it(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    writes: list[str],
    loop: str,
) -> None:
    """Hand-overs and costs between the stages differ several times from loop to loop, and are most of a short step."""
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "report.html"
    code, _, err = run(capsys, "plan", *SMALL, *writes, "--html", str(page))
    assert code == 0 and f"assumptions “{loop}”" in page.read_text()
    assert (f"priced as {loop}'s own loop" in err) == (loop != "default")
    if writes[:1] == ["-o"]:
        assert f"under the assumptions `{loop}`" in (tmp_path / "run.toml").read_text().replace("\n# ", " ")


def test_measured_lengths_replace_mean_and_sigma(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("100\n200\n4000\n")
    base = ["plan", "--model", "qwen3-8b", "--max-response-tokens", "4000"]
    _, out, _ = run(capsys, *base, "--lengths", str(path), "--json")
    measured = json.loads(out)["step"]["seconds"]["total"]
    _, out, _ = run(capsys, *base, "--response-tokens", "1433", "--length-sigma", "0", "--json")
    assert measured != json.loads(out)["step"]["seconds"]["total"]
    code, _, err = run(capsys, *base, "--lengths", str(tmp_path / "none.txt"))
    assert code == 2 and "cannot read" in err


SMALL = [
    "--model", "qwen3-0.6b", "--num-gpus", "8", "--prompts", "16", "--group-size", "4", "--response-tokens", "256",
]  # fmt: skip


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_sync", "separate_async"])
def test_simulate_prints_step_idle_shares_and_a_timeline(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, "simulate", *SMALL, "--mode", mode)
    assert code == 0
    for word in ("step", "rollout GPUs idle", "training GPUs idle", "bubble", "engines", "trainer"):
        assert word in out
    assert ("tail, last tenth" in out) == (mode in ("sync", "separate_sync"))
    assert ("Staleness" in out) == (mode in ("colocate_async", "separate_async"))
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80


def test_simulate_prints_json_with_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "simulate", *SMALL, "--split", "4:4", "--steps", "6", "--turns", "3", "--env-seconds", "0.5",
        "--replica-mtbf-hours", "1", "--failure-frac", "0.1", "--take", "arrival", "--json",
    )  # fmt: skip
    data = json.loads(out)
    assert code == 0 and len(data["steps"]) == 6
    assert data["num_failed"] > 0
    assert data["tail_s"] is None  # the next batch fills it
    assert data["topology"]["mode"] == "separate_async"
    assert sum(data["staleness"].values()) == data["num_trained"]


@pytest.mark.parametrize(
    ("args", "remedy"),
    [
        (["--mode", "sync", "--split", "4:4"], "a separated mode"),
        (["--mode", "colocate_async", "--lend", "5"], "a separated mode"),
        (["--on-stale", "wait"], "--take arrival"),
        (["--replica-recovery-seconds", "60"], "--replica-mtbf-hours"),
    ],
)
def test_simulate_refuses_an_option_that_would_be_ignored(
    capsys: pytest.CaptureFixture[str], args: list[str], remedy: str
) -> None:
    code, out, err = run(capsys, "simulate", *SMALL, *args)
    assert (code, out) == (2, "") and "has no effect" in err and remedy in err


def test_simulate_tells_what_its_topology_does_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--num-gpus", "16", "--prompts", "16", "--response-tokens", "256", "--steps", "3"]
    code, out, err = run(
        capsys, "simulate", "--model", "Qwen3-8B", *job, "--mode", "sync", "--changed-frac", "0.5"
    )
    assert code == 0 and out
    assert "note: --changed-frac changes nothing of what is simulated" in err
    alone = ["--num-gpus", "1", *job[2:]]  # one GPU is shared, whatever the seconds
    _, _, err = run(
        capsys, "simulate", "--model", "Qwen3-0.6B", *alone, "--max-staleness", "0", "--lend", "5"
    )
    assert "note: --lend changes nothing of what is simulated" in err
    apart = ["--mode", "separate_async", "--split", "8:8", "--sleep-level", "1", "--rebuild-engine"]
    _, _, err = run(capsys, "simulate", "--model", "Qwen3-8B", *job, *apart)
    assert err.count("no engine sleeps") == 2


def test_simulate_refuses_failures_that_leave_no_time_to_work(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "simulate", *SMALL, "--replica-mtbf-hours", "1e-7")
    assert (code, out) == (2, "") and "more than 100 times a step" in err
    least = err.rstrip().rsplit(" ", 1)[1]
    assert run(capsys, "simulate", *SMALL, "--replica-mtbf-hours", least)[0] == 0


def test_simulate_refuses_a_mode_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "simulate", "--model", "deepseek-v3", "--num-gpus", "8", "--mode", "sync")
    assert code == 2 and "sync does not fit" in err and "Traceback" not in err


@pytest.mark.parametrize(
    "extra", [["--max-staleness", "0"], ["--max-staleness", "1"], ["--split", "216:296"]]
)
def test_printed_topologies_stand_by_step_time_and_the_recommended_one_is_marked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, extra: list[str]
) -> None:
    """On-policy may be recommended before faster ones: then the list says so instead of the order."""
    monkeypatch.setenv("COLUMNS", "110")
    base = ["plan", "--model", "deepseek-v3", "--num-gpus", "512", *extra]
    _, out, _ = run(capsys, *base)
    listed = out.split("Topologies, fastest first")[1].split("What one step has to do")[0]
    rows = re.findall(r"(→?) *(?:colocated|separated).*? (\d[\d:]*)(?: shared)? +([\d,.]+) s ", listed)
    steps = [float(step.replace(",", "")) for _, _, step in rows]
    assert len(rows) >= 6 and steps == sorted(steps)
    assert [mark for mark, _, _ in rows].count("→") == 1
    if rows[0][0] != "→":
        assert "recommended before faster ones: the staleness bound is 0" in listed
    data = json.loads(run(capsys, *base, "--json")[1])["topologies"]
    fitting = [t["step_s"] for t in data if t["fits"]]
    assert fitting == sorted(fitting) and [t["fits"] for t in data] == sorted([t["fits"] for t in data])[::-1]
    keys = {(t["mode"], t["num_rollout_gpus"], t["num_train_gpus"], t["offload"]) for t in data}
    assert len(keys) == len(data)


def test_an_unknown_gpu_names_the_nearest_few_and_how_to_see_all(capsys: pytest.CaptureFixture[str]) -> None:
    for name, near in (("H1000", "'H100'"), ("abacus", "names: ")):
        code, _, err = run(capsys, "plan", "--model", "qwen3-8b", "--gpu", name)
        hint = err.splitlines()[1]
        assert code == 2 and near in hint and "`rollbook plan --gpu list` prints all" in hint
        assert len(hint) < 200
    code, out, _ = run(capsys, "plan", "--gpu", "list")
    assert code == 0 and {"H100 SXM", "MI300X"} <= set(out.splitlines())


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_an_unknown_model_is_told_how_to_see_all(capsys: pytest.CaptureFixture[str], command: str) -> None:
    for name in ("bert-base-uncased", "qwen3-9b"):
        code, _, err = run(capsys, command, "--model", name)
        assert code == 2 and "`rollbook plan --model list` prints all" in err
    code, out, _ = run(capsys, command, "--model", "list")
    assert code == 0 and {"Qwen3-8B", "DeepSeek-V3"} <= set(out.splitlines())


@pytest.mark.parametrize("option", ["-o", "--html"])
def test_a_place_that_no_file_can_have_is_told_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    def work(*args: object, **kwargs: object) -> None:
        raise AssertionError("planned first")

    monkeypatch.setattr("rollbook.planner.plan.make_plan", work)
    for path, why in ((tmp_path, "it is a folder"), (tmp_path / "no" / "file", "there is no folder")):
        code, _, err = run(capsys, "plan", "--model", "qwen3-8b", option, str(path))
        assert code == 2 and f"cannot write {path}: {why}" in err


def test_a_plan_without_a_model_says_how_to_name_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", "--num-gpus", "8")
    assert code == 2 and "no model is named" in err and "qwen3-8b" in err


def test_a_simulated_loan_stands_beside_the_closed_form_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--model", "Qwen3-8B", "--num-gpus", "32", "--prompts", "128", "--response-tokens", "4k"]
    job += ["--split", "8:24", "--max-staleness", "4"]
    _, out, _ = run(capsys, "plan", *job, "--lend", "2", "--json")
    planned = next(
        row for row in json.loads(out)["topologies"]
        if (row["mode"], row["num_rollout_gpus"]) == ("separate_async", 8)
    )  # fmt: skip
    closed = {}
    for lend in ("2", "0"):
        _, out, _ = run(capsys, "simulate", *job, "--lend", lend, "--steps", "8", "--json")
        closed[lend] = json.loads(out)["closed_form_step_s"]
    assert closed["2"] == pytest.approx(planned["step_s"]) and closed["2"] < 0.95 * closed["0"]


@pytest.mark.parametrize("system", ["verl", "slime", "areal"])
def test_an_export_is_of_the_trainer_that_was_priced(capsys: pytest.CaptureFixture[str], system: str) -> None:
    """slime has Megatron alone; the others take FSDP2 where it fits, unless Megatron is asked for."""
    job = (
        "plan",
        "--model",
        "Qwen3-30B-A3B",
        "--num-gpus",
        "32",
        "--response-tokens",
        "8k",
        "--emit",
        system,
    )
    _, out, _ = run(capsys, *job)
    _, of_megatron, _ = run(capsys, *job, "--stack", "megatron")
    assert ("fsdp" in out) == (system != "slime") and "fsdp" not in of_megatron
    assert (out == of_megatron) == (system == "slime")


def test_experts_that_fsdp_cannot_hold_are_exported_to_megatron(capsys: pytest.CaptureFixture[str]) -> None:
    job = ("plan", "--model", "DeepSeek-V3", "--num-gpus", "256", "--response-tokens", "2k", "--emit", "verl")
    _, out, _ = run(capsys, *job)
    assert "model_engine=megatron" in out and "num_layers_in_last_pipeline_stage" in out


@pytest.mark.parametrize(
    ("system", "name"), [("verl", "vLLM"), ("slime", "SGLang"), ("areal", "SGLang"), ("", "vLLM")]
)
def test_decoding_is_priced_as_the_engine_of_what_is_written(
    capsys: pytest.CaptureFixture[str], system: str, name: str
) -> None:
    """Half a billion parameters on an H200: the host sets the pace, 25 us a sequence in vLLM and 10 in SGLang."""
    job = (
        "plan",
        "--model",
        "Qwen2.5-0.5B",
        "--gpu",
        "H200",
        "--num-gpus",
        "8",
        "--response-tokens",
        "1k",
    )
    _, out, _ = run(capsys, *job, *(("--emit", system) if system else ()))
    words = " ".join(out.split())
    other = "SGLang" if name == "vLLM" else "vLLM"
    assert f"Engines are priced as {name}, which generates a step in " in words
    assert re.search(rf"; {other}( and [\w-]+)? would take [\d.]+ m?s", words)


@pytest.mark.parametrize(("model", "runs"), [("Qwen3-8B", True), ("Llama-3.1-70B", False)])
def test_what_train_cannot_run_is_said_beside_what_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str, runs: bool
) -> None:
    """An engine of 140 GB of weights beside a rank has no room on one GPU, and Ray's replicas have one each."""
    job = ("plan", "--model", model, "--num-gpus", "32", "--response-tokens", "1k")
    _, _, err = run(capsys, *job, "-o", str(tmp_path / "run.toml"))
    assert ("`rollbook train` cannot run the file" in err) != runs
    _, out, _ = run(capsys, *job, "--emit", "kubernetes")
    assert out.startswith("# NOT RUNNABLE") != runs


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("--emit", "slime", "--engine", "vllm"), "--emit slime, which writes for sglang"),
        (("-o", "run.toml", "--engine", "sglang"), "-o, which writes for vllm"),
        (("--engine", "sglnag"), "did you mean 'sglang'"),
        (("--engine", "sglang", "--assume", "paper"), "under the paper account"),
    ],
)
def test_an_engine_that_does_not_run_what_is_written_is_refused(
    capsys: pytest.CaptureFixture[str], asked: tuple[str, ...], told: str
) -> None:
    code, _, err = run(capsys, "plan", "--model", "Qwen2.5-0.5B", *asked)
    assert code == 2 and told in " ".join(err.split())


def test_a_plan_for_fsdp_alone_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    job = ("plan", "--model", "Qwen3-8B", "--num-gpus", "8", "--response-tokens", "1k", "--emit", "verl")
    _, out, err = run(capsys, *job)
    assert "strategy=fsdp2" in out and "megatron" not in out and "--stack" not in err
    _, out, _ = run(capsys, *job, "--stack", "megatron")
    assert "model_engine=megatron" in out and "fsdp" not in out
