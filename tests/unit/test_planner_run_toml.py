"""Every config that `plan -o` writes is one that `train` takes where the needed parts are installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollbook.cli.main import main
from rollbook.config.loading import load_config
from rollbook.config.run_config import RunConfig
from rollbook.controller import startable
from rollbook.errors import ConfigError
from rollbook.ledger.hardware import MachineSpec
from rollbook.planner.execution import Execution, execution
from rollbook.planner.options import PlanOptions
from rollbook.planner.plan import Plan, make_plan

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "intermediate_size": 128,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
CPU = MachineSpec(
    name="a desk", device="cpu", gemm_flops_per_s={"float32": 1e11, "bfloat16": 2e11}, copy_bytes_per_s=2e10,
    memory_bytes=16 * 2**30,
)  # fmt: skip


@pytest.fixture
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with vLLM for CUDA and eight GPUs, as far as the static checks look."""
    import torch

    found = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return object() if name == "vllm" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(startable, "_is_installed", lambda package: package == "vllm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    yield


def written(folder: Path, *args: str) -> tuple[RunConfig, str]:
    path = folder / "run.toml"
    with pytest.raises(SystemExit) as ended:
        main(["plan", *args, "-o", str(path)])
    assert not ended.value.code
    return load_config(path, [], RunConfig), path.read_text()


def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "qwen3-tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


GPU_CASES = [
    ("qwen3-0.6b", 1, []),
    ("qwen3-0.6b", 2, ["--split", "1:1", "--response-tokens", "16k"]),
    ("qwen3-8b", 8, []),
    ("qwen3-8b", 8, ["--max-staleness", "0"]),
    ("qwen3-8b", 64, ["--prompts", "64", "--algorithm", "ppo", "--reward", "model"]),
    ("qwen3-8b", 16, ["--response-tokens", "8k", "--max-response-tokens", "32k", "--max-staleness", "4"]),
    (
        "qwen3-32b",
        64,
        ["--turns", "5", "--observation-tokens", "200", "--env-seconds", "2", "--reward", "sandbox"],
    ),
    ("qwen3-32b", 128, ["--assume", "paper", "--no-reference", "--no-proximal"]),
    ("qwen3-30b-a3b", 64, ["--rollout-dtype", "auto", "--mini-batches", "16"]),
    ("gpt-oss-20b", 16, ["--group-size", "2", "--prompts", "7"]),
    ("deepseek-v3", 512, ["--max-staleness", "2"]),
    ("qwen3-8b", 8, ["--lora-rank", "16", "--checkpoint-every", "7"]),
    ("qwen3-32b", 32, ["--lora-rank", "32", "--lora-publish", "adapter", "--checkpoint-async"]),
]


@pytest.mark.parametrize(("model", "num_gpus", "extra"), GPU_CASES)
@pytest.mark.usefixtures("everything_installed")
def test_a_plan_for_gpus_is_a_config_that_train_can_start(
    tmp_path: Path, model: str, num_gpus: int, extra: list[str]
) -> None:
    config, text = written(tmp_path, "--model", model, "--num-gpus", str(num_gpus), *extra)
    config.check(startable.unstartable(config))
    assert f"# - {num_gpus} x H100 SXM with CUDA" in text
    flat = text.replace("\n# ", " ")
    is_ray = config.cluster.kind == "ray"
    packages = "ray,vllm" if is_ray else "vllm"
    assert (config.rollout.engine, config.rollout.vllm.in_process) == ("vllm", is_ray)
    assert f"pip install 'rollbook[{packages}]'" in flat
    assert config.memory.moves_anything == (not is_ray and config.run.schedule in ("sync", "colocate_async"))
    # Whatever a plan has of more than one GPU and `train` does otherwise is told by its key.
    told = flat.partition("Not carried out as planned")[2].partition("#  1. What one step")[0]
    if is_ray:
        assert config.cluster.num_trainer_ranks > 1
        assert config.rollout.vllm.tp_size == 1
        assert "rollout.engine" not in told and "sync.transport: planned" in told
        assert config.sync.transport == ("disk" if num_gpus > 8 else "shm")
    elif num_gpus > 2:
        assert "cluster.num_trainer_ranks: planned" in told


@pytest.mark.parametrize(
    "extra", [[], ["--algorithm", "ppo"], ["--mini-batches", "4", "--max-staleness", "0"]]
)
def test_a_plan_for_a_cpu_is_a_config_that_train_can_start_here(tmp_path: Path, extra: list[str]) -> None:
    """No fixture: nothing but this installation is needed."""
    hardware = tmp_path / "hardware.toml"
    CPU.write(hardware)
    config, text = written(
        tmp_path, "--model", str(model_folder(tmp_path)), "--gpu", str(hardware), "--num-gpus", "1",
        "--prompts", "8", "--group-size", "4", "--prompt-tokens", "20", "--response-tokens", "16", *extra,
    )  # fmt: skip
    config.check(startable.unstartable(config))
    assert (config.rollout.engine, config.sync.transport) == ("native", "inproc")
    assert (config.model.device, config.rollout.device, config.model.dtype) == ("cpu", "cpu", "float32")
    longest = 20 + config.rollout.max_response_tokens
    assert longest <= config.rollout.kv_pool_tokens <= config.rollout.num_slots * longest
    assert "vllm" not in text.lower()
    assert config.model.path is not None
    assert Path(config.model.path) == (tmp_path / "qwen3-tiny").resolve()


def test_a_processor_publishes_at_its_measured_rate(tmp_path: Path) -> None:
    """No link and no base of GPU clusters: base + float32 bytes / rate, and `train` reads the same file."""
    hardware = tmp_path / "hardware.toml"
    CPU.write(hardware)
    options = PlanOptions(
        model=str(model_folder(tmp_path)), gpu=str(hardware), num_gpus="1", prompts="8", group_size="4",
        prompt_tokens="20", response_tokens="16",
    )  # fmt: skip
    plan = make_plan(options.request(), is_brief=True)
    publication, chosen = plan.publication, plan.require_chosen()
    assert publication is not None
    moved = 4 * plan.request.model.computed_params
    rate = CPU.digest_bytes_per_s or CPU.copy_bytes_per_s
    assert publication.account.total_bytes == moved
    assert publication.seconds == pytest.approx(CPU.sync_base_s + moved / rate)
    assert chosen.account.seconds.sync == pytest.approx(publication.seconds)
    assert "CUDA" not in publication.because and "network" not in publication.because
    config, _ = written(
        tmp_path, "--model", str(tmp_path / "qwen3-tiny"), "--gpu", str(hardware), "--num-gpus", "1",
        "--prompts", "8", "--group-size", "4", "--prompt-tokens", "20", "--response-tokens", "16",
    )  # fmt: skip
    assert config.plan.hardware == str(hardware)
    replace(CPU, model="/models/another").write(hardware)
    config, _ = written(
        tmp_path, "--model", str(tmp_path / "qwen3-tiny"), "--gpu", str(hardware), "--num-gpus", "1",
        "--prompts", "8", "--group-size", "4", "--prompt-tokens", "20", "--response-tokens", "16",
    )  # fmt: skip
    assert config.plan.hardware == ""  # another model's seconds are no expectation of this one


def test_what_train_cannot_do_of_the_plan_is_said(tmp_path: Path) -> None:
    _, text = written(tmp_path, "--model", "qwen3-32b", "--num-gpus", "8", "--rollout-dtype", "float8")
    assert "float8 weights" in text.replace("\n# ", " ")


def test_a_processor_hands_nothing_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The seconds of hand-overs and of orchestration were measured on GPU clusters."""
    hardware = tmp_path / "hardware.toml"
    CPU.write(hardware)
    sizes = ["--prompts", "8", "--prompt-tokens", "20", "--response-tokens", "16", "--num-gpus", "1"]
    with pytest.raises(SystemExit):
        main(["plan", "--model", str(model_folder(tmp_path)), "--gpu", str(hardware), *sizes, "--json"])
    seconds = json.loads(capsys.readouterr().out)["step"]["seconds"]
    assert seconds["switch"] == seconds["other"] == 0 and seconds["train"] > 0


@pytest.mark.usefixtures("everything_installed")
def test_adapters_and_checkpoints_of_the_plan_are_written(tmp_path: Path) -> None:
    config, text = written(
        tmp_path, "--model", "qwen3-8b", "--lora-rank", "16", "--lora-publish", "adapter", "--checkpoint-every", "7",
        "--checkpoint-async",
    )  # fmt: skip
    assert config.model.lora is not None
    assert (config.model.lora.rank, config.model.lora.publish) == (16, "merged")
    assert config.checkpoint.every_steps == 7
    flat = text.replace("\n# ", " ")
    assert "vLLM's processes take them merged" in flat and "stands still until it is written" in flat


def test_native_engines_of_a_cpu_take_adapters_alone(tmp_path: Path) -> None:
    hardware = tmp_path / "hardware.toml"
    CPU.write(hardware)
    config, _ = written(
        tmp_path, "--model", str(model_folder(tmp_path)), "--gpu", str(hardware), "--num-gpus", "1", "--prompts", "4",
        "--group-size", "2", "--prompt-tokens", "16", "--response-tokens", "32", "--lora-rank", "4",
        "--lora-publish", "adapter",
    )  # fmt: skip
    assert config.model.lora is not None and config.model.lora.publish == "adapter"
    config.check(startable.unstartable(config))


def made(*, num_gpus: str, model: str = "qwen3-8b", **options: Any) -> tuple[Plan, Execution]:
    plan = make_plan(PlanOptions(model=model, num_gpus=num_gpus, **options).request(), is_brief=True)
    return plan, execution(plan.request, plan.require_chosen())


def test_separated_one_gpu_replicas_run_on_ray_as_planned() -> None:
    """6 engines beside 2 trainers of 0.6B: as many ranks and replicas as the plan has GPUs."""
    options = {"prompts": "16", "max_response_tokens": "32k", "max_staleness": 4}
    plan, done = made(model="qwen3-0.6b", num_gpus="8", assume="nemo", **options)
    rollout, train = plan.require_chosen().split
    assert plan.require_chosen().mode == "separate_async"
    assert (done.kind, done.num_trainer_ranks, done.num_replicas) == ("ray", train, rollout)
    assert [text.partition(":")[0] for text in done.differences] == ["sync.transport"]


def test_colocated_gpus_on_ray_keep_what_the_trainer_leaves() -> None:
    """16 B x 8.2e9 over 8 GPUs and an eighth of the reference stay beside the engine's 16.4 GB."""
    plan, done = made(num_gpus="8", max_staleness=0, recompute="full")
    chosen = plan.require_chosen()
    assert chosen.mode == "sync" and done.kind == "ray"
    weights = 2 * plan.request.model.computed_params
    trainer = chosen.account.train.train_state_bytes_per_gpu + chosen.account.train.reference_bytes_per_gpu
    assert done.kv_pool_bytes < 72e9 - weights - trainer
    assert done.num_slots < chosen.account.rollout.slots_per_replica
    keys = [text.partition(":")[0] for text in done.differences]
    assert keys == ["rollout.num_replicas", "memory", "sync.transport"]


def test_what_no_way_can_run_is_said_with_its_bytes() -> None:
    """671B: no GPU holds an engine of its own, and one process no trainer."""
    _, done = made(model="deepseek-v3", num_gpus="512")
    assert done.kind == "inproc"
    (ranks,) = (text for text in done.differences if text.startswith("cluster.num_trainer_ranks: planned"))
    assert "run out of memory" in ranks
    assert any(text.startswith("rollout.num_replicas: planned on 64 hosts") for text in done.differences)


def test_one_training_gpu_is_carried_out_as_planned() -> None:
    _, done = made(model="qwen3-0.6b", num_gpus="1")
    assert (done.kind, done.differences) == ("inproc", ())


@pytest.mark.usefixtures("everything_installed")
def test_a_plan_of_several_hosts_is_refused_only_what_ray_refuses(tmp_path: Path) -> None:
    config, text = written(tmp_path, "--model", "qwen3-8b", "--num-gpus", "16")
    assert (config.cluster.kind, config.cluster.address) == ("ray", "auto")
    assert (config.sync.transport, str(config.sync.disk_dir)) == ("disk", "weights")
    assert "a Ray cluster of the 2 hosts" in text.replace("\n# ", " ")
    vllm_apart = ["rollout.vllm.in_process=false"]
    for refused in (vllm_apart, ['sync.transport="ipc"']):
        with pytest.raises(ConfigError, match="ray"):
            load_config(tmp_path / "run.toml", refused, RunConfig).check([])


@pytest.mark.usefixtures("everything_installed")
def test_choices_without_a_key_are_told_and_those_with_one_are_written(tmp_path: Path) -> None:
    config, text = written(
        tmp_path, "--model", "qwen3-8b", "--num-gpus", "8", "--prefill-chunk", "8k", "--no-share-prompts",
        "--turns", "3", "--env-seconds", "2", "--lose-prefix", "--reward", "sandbox", "--rebuild-engine",
    )  # fmt: skip
    told = text.partition("Not carried out as planned")[2].partition("# 1. What one step")[0]
    keys = [line[4:].partition(":")[0] for line in told.splitlines() if line.startswith("# - ")]
    assert keys[:4] == ["reward.terms", "data.sources", "rollout", "memory"]
    assert config.rollout.max_prefill_tokens == 8192  # running sequences included, as vLLM counts
    assert config.rollout.prefix_cache is False


@pytest.mark.usefixtures("everything_installed")
def test_vllm_takes_the_whole_budget_and_the_sleep_level(tmp_path: Path) -> None:
    config, _ = written(
        tmp_path, "--model", "qwen3-0.6b", "--num-gpus", "1", "--prefill-chunk", "8k", "--sleep-level", "1"
    )
    assert (config.rollout.engine, config.rollout.max_prefill_tokens, config.memory.sleep_level) == (
        "vllm",
        8192,
        1,
    )
