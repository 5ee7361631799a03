"""A published case says the same whatever words, units and order its collector chose: predictions must not move."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("yaml")

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from ledger_cases import compare  # noqa: E402
from ledger_errors import load_cases  # noqa: E402
from ledger_numbers import figure, seconds_of  # noqa: E402
from ledger_prose import degrees  # noqa: E402
from ledger_reading import as_read  # noqa: E402
from ledger_words import Case, NotCovered  # noqa: E402
from rollbook.ledger.assumptions import load_assumptions  # noqa: E402

CATEGORIES = ("decode", "rl_step", "train_mfu", "weight_sync")
ASSUMPTIONS = load_assumptions("default")


@pytest.fixture(scope="module")
def cases() -> list[tuple[Case, list[float]]]:
    """Every open case that is predicted, with its ratios."""
    rows = load_cases(BENCH / "data", CATEGORIES, "A")
    return [(case, found) for case in rows if isinstance(found := ratios_of(case), list)]


def ratios_of(case: Case) -> list[float] | str:
    """Predicted over measured of every number, or why there is none: units cancel."""
    try:
        found = compare(case, ASSUMPTIONS)
    except NotCovered as reason:
        return str(reason)
    return sorted(item.predicted.value / item.measured for item in found)


Change = Callable[[Case], None]

OTHER_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "rl_step": {
        "prompts_per_step": ("num_prompts_per_step", "prompts per batch", "train_batch_size"),
        "train_batch_size_prompts": ("prompts", "rollout_batch_size", "unique_prompts_per_step"),
        "generations_per_prompt": ("group size", "n_samples_per_prompt", "num_generations"),
        "rollout_n": ("responses_per_prompt", "samplesPerPrompt", "n"),
        "samples_per_step": ("trajectories_per_step", "num_sequences", "rollouts per step"),
        "mean_response_length": ("avg_response_tokens", "response_length_avg", "mean output length"),
        "max_response_length": ("max_output_tokens", "response_limit", "maxResponseLen"),
        "mean_prompt_length": ("avg_prompt_len", "prompt_tokens_mean", "average input tokens"),
        "max_sequence_length": ("max_seq_len", "max_model_len", "max_total_tokens"),
        "gpus": ("num_gpus", "GPU count", "total_gpus"),
        "gpu": ("gpu_type", "accelerator", "hardware"),
        "rollout_tp": ("rollout_tensor_parallel_size", "vllm_tp", "generation_tp"),
        "model": ("policy_model", "model_name", "actor_model"),
        "train_batch_T_GBS": ("train_global_batch_size", "global_batch_size", "gbs"),
        "gpu_split": ("split", "gpu_allocation", "resource_allocation"),
    },
    "decode": {
        "concurrency": ("max_concurrency", "num_concurrent", "concurrent_requests"),
        "batch_size": ("batch", "bs", "static_batch_size"),
        "input_length": ("isl", "prompt_tokens", "input_len"),
        "output_length": ("osl", "output_tokens", "generated_len"),
        "requests": ("num_requests", "num_prompts", "n_requests"),
        "tp": ("tensor_parallel_size", "tp_size", "tensor parallelism"),
        "precision": ("dtype", "quantization", "weight_precision"),
        "gpus": ("num_gpus", "n_gpus", "GPU count"),
        "engine": ("serving_engine", "framework", "inference backend"),
        "kv_cache": ("kv_cache_dtype", "kv_dtype", "kv precision"),
    },
    "train_mfu": {
        "sequence_length": ("seq_len", "context_length", "seqlen"),
        "gbs": ("global_batch_size", "global batch", "batch_size"),
        "mbs": ("micro_batch_size", "local_batch_size", "per_device_train_batch_size"),
        "tp": ("tensor_parallel", "tp_size", "tensor_model_parallel_size"),
        "pp": ("pipeline_parallel", "pp_size", "pipeline_model_parallel_size"),
        "cp": ("context_parallel", "cp_size", "context parallelism"),
        "ep": ("expert_parallel", "ep_size", "expert_model_parallel_size"),
        "vp": ("vpp", "virtual_pipeline", "virtual_stages"),
        "gpus": ("num_gpus", "world_size", "devices"),
        "recompute": ("activation_checkpointing", "gradient_checkpointing", "recomputation"),
    },
    "weight_sync": {
        "train_gpus": ("trainer_gpus", "num_train_gpus", "training ranks"),
        "rollout_gpus": ("inference_gpus", "generation_gpus", "engine ranks"),
        "rollout_precision": ("inference_dtype", "engine_precision", "weights_dtype"),
        "gpus_per_node": ("node_size", "gpus_a_node", "node size"),
        "model": ("policy_model", "model_name", "llm"),
        "network": ("interconnect", "fabric", "nic"),
    },
}


def renamed(choice: int) -> Change:
    """Fields under names that others use."""

    def change(case: Case) -> None:
        names = OTHER_NAMES[case["category"]]
        config = case["config"]
        for key in [key for key in config if key in names]:
            other = names[key][choice]
            if other not in config:
                config[other] = config.pop(key)

    return change


def reversed_order(case: Case) -> None:
    for part in ("config", "measured"):
        case[part] = dict(reversed(list(case[part].items())))


def written_out(case: Case) -> None:
    """Counts with a thousands separator and their unit, as tables print them."""
    for key, value in case["config"].items():
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            if "length" in key or "tokens" in key:
                case["config"][key] = f"{value:,} tokens"
            elif key in ("gpus", "train_gpus", "rollout_gpus"):
                case["config"][key] = f"{value} GPUs"
            elif key in ("prompts_per_step", "concurrency", "gbs", "requests", "batch_size"):
                case["config"][key] = f"{value:,}"


def in_thousands(case: Case) -> None:
    """Limits of 4,096 and 32,768 tokens as 4k and 32K."""
    for number, (key, value) in enumerate(list(case["config"].items())):
        if isinstance(value, int) and "length" in key and value % 1024 == 0 and value >= 1024:
            case["config"][key] = f"{value // 1024}{'kK'[number % 2]}" + (" tokens" if number % 3 else "")


def in_milliseconds(case: Case) -> None:
    """Seconds of steps and publications as milliseconds, milliseconds of tokens as seconds."""
    for key, value in list(case["measured"].items()):
        if isinstance(value, (int, float)) and key in ("step_s", "sync_s"):
            case["measured"][f"{key[:-2]}_ms"] = 1e3 * case["measured"].pop(key)
        if isinstance(value, (int, float)) and key in ("tpot_ms", "itl_ms"):
            case["measured"][f"{key[:-3]}_s"] = case["measured"].pop(key) / 1e3


def in_minutes(case: Case) -> None:
    for key, value in list(case["measured"].items()):
        if isinstance(value, (int, float)) and key in ("step_s", "total_step_s"):
            case["measured"][f"{key[:-2]}_min"] = case["measured"].pop(key) / 60


def with_units_beside(case: Case) -> None:
    """ "2 min 12.5 s" and "350 ms" as the value of a field in seconds."""
    for key, value in list(case["measured"].items()):
        if key in ("step_s", "total_step_s", "sync_s", "nccl_full_broadcast_s") and isinstance(
            value, (int, float)
        ):
            case["measured"][key] = (
                f"{int(value // 60)} min {value % 60:.4f} s" if value > 100 else f"about {1e3 * value:.3f} ms"
            )


MEASURED_NAMES = {
    "step_s": ("seconds_per_step", "mean_step_time_s", "iteration_time_s"),
    "total_step_s": ("step_duration_s", "s_per_step", "avg step time (s)"),
    "sync_s": ("weight_transfer_time_s", "mean_refit_s", "weight_update_latency_s"),
    "output_tokens_per_s": ("output_tok_per_s", "generation_throughput_tokens_per_s", "output throughput tok/s"),
    "output_tokens_per_s_per_gpu": ("output_tokens_per_gpu_per_s", "output_tok_s_gpu", "decode_tokens_per_second_gpu"),
    "tpot_ms": ("mean_tpot_ms", "time_per_output_token_ms", "TPOT (ms)"),
    "tokens_per_s_per_gpu": ("tok_per_s_per_gpu", "tokens_per_sec_per_device", "throughput_tokens_per_s_per_gpu"),
    "model_tflops_per_gpu": ("tflops", "tflops_gpu", "model_tflops_per_s_per_gpu"),
    "mfu_pct": ("mfu", "mfu_percent", "MFU (%)"),
}  # fmt: skip


def measured_renamed(choice: int) -> Change:
    def change(case: Case) -> None:
        for key in [key for key in case["measured"] if key in MEASURED_NAMES]:
            case["measured"][MEASURED_NAMES[key][choice]] = case["measured"].pop(key)

    return change


def device_in_full(case: Case) -> None:
    config = case["config"]
    full = {
        "H100": "NVIDIA H100 80GB HBM3 (SXM5)",
        "A100 80GB": "NVIDIA A100-SXM4-80GB",
        "H200": "NVIDIA H200 141GB",
        "B200": "NVIDIA B200 180 GB",
        "H20": "NVIDIA H20 (96 GB)",
    }
    if config.get("gpu") in full:
        config["gpu"] = full[config["gpu"]]


def devices_counted_by_name(case: Case) -> None:
    """ "32x H100" instead of a device and a count."""
    config = case["config"]
    is_plain = isinstance(config.get("gpus"), int) and re.match(r"[A-Z]", str(config.get("gpu", "")))
    if case["category"] != "weight_sync" and is_plain:
        config["gpu"] = f"{config.pop('gpus')}x {config['gpu']}"


def devices_by_nodes(case: Case) -> None:
    config = case["config"]
    if case["category"] != "weight_sync" and isinstance(config.get("gpus"), int) and config["gpus"] % 8 == 0:
        config["nodes"], config["gpus_per_node"] = config.pop("gpus") // 8, 8


def model_in_full(case: Case) -> None:
    """With its organisation, and in the spelling of file names."""
    name = str(case["config"].get("model", ""))
    if re.fullmatch(r"Qwen[\w.-]+", name):
        case["config"]["model"] = f"Qwen/{name}"
    elif re.fullmatch(r"(DeepSeek|Llama)[\w.-]+", name):
        case["config"]["model"] = (
            name.lower().replace("-", "_") if "3.1" not in name else f"meta-llama/{name}"
        )


def noted(case: Case, text: str) -> None:
    case["notes"] = f"{case.get('notes') or ''} {text}".strip()


def batch_in_prose(case: Case) -> None:
    config = case["config"]
    for prompts, group in (
        ("prompts_per_step", "generations_per_prompt"),
        ("train_batch_size_prompts", "rollout_n"),
    ):
        if prompts in config and group in config and "prompts" not in str(case.get("notes")):
            noted(
                case,
                f"A step has {config.pop(prompts)} prompts with {config.pop(group)} responses per prompt.",
            )


def batch_as_a_product(case: Case) -> None:
    config = case["config"]
    for prompts, group in (
        ("prompts_per_step", "generations_per_prompt"),
        ("train_batch_size_prompts", "rollout_n"),
    ):
        if prompts in config and group in config:
            config["batch"] = f"{config.pop(prompts)} x {config.pop(group)}"


def lengths_in_prose(case: Case) -> None:
    config = case["config"]
    if case["category"] == "rl_step" and "response" not in str(case.get("notes")).lower():
        if isinstance(config.get("mean_response_length"), (int, float)):
            noted(case, f"The mean response length is {config.pop('mean_response_length')} tokens.")
        if isinstance(config.get("max_response_length"), int):
            noted(case, f"Maximum response length {config.pop('max_response_length'):,}.")
    is_told = "input" in str(case.get("notes")).lower() or "max_concurrency" in config
    is_plain = "concurrency" in config and isinstance(config.get("input_length"), int)
    if case["category"] == "decode" and is_plain and not is_told:
        noted(case, f"ISL {config.pop('input_length')}, OSL {config.pop('output_length')}.")
        noted(case, f"Measured at a concurrency of {config.pop('concurrency')}.")


def degrees_in_prose(case: Case) -> None:
    """Columns and fields of degrees as "TP4 PP2 CP1 EP8"."""
    config = case["config"]
    columns = re.fullmatch(
        r"\[(\d+),(\d+),(\d+|n/a),(\d+),(\d+|n/a)\]", str(config.get("training_parallel", ""))
    )
    if case["category"] == "rl_step" and columns:
        del config["training_parallel"]
        tp, cp, ep, pp, vp = columns.groups()
        said = f"TP{tp} PP{pp} CP{cp}" + f" EP{ep}" * (ep != "n/a") + f" VP{vp}" * (vp != "n/a")
        config["train_parallel"] = said
        config.pop("training_parallel_columns", None)
    if case["category"] == "train_mfu" and all(
        isinstance(config.get(k), int) for k in ("tp", "pp", "cp", "ep")
    ):
        config["parallelism"] = ", ".join(f"{k.upper()}={config.pop(k)}" for k in ("tp", "pp", "cp", "ep"))


def sides_in_prose(choice: int) -> Change:
    """GPUs of both sides of a publication in its placement."""

    def change(case: Case) -> None:
        config = case["config"]
        sides = [config.get(key) for key in ("train_gpus", "rollout_gpus")]
        if case["category"] != "weight_sync" or not all(isinstance(side, int) for side in sides):
            return
        if "coloc" in f"{config.get('placement')} {config.get('framework')}".lower():
            return
        del config["train_gpus"], config["rollout_gpus"]
        train, rollout = sides
        said = (
            f"{train} training GPUs and {rollout} inference GPUs",
            f"{train} GPUs for the trainer, {rollout} GPUs for rollouts",
            f"{train} trainer ranks, {rollout} engine ranks",
        )[choice]
        config["setup"] = said

    return change


MODES = {
    "colocated sync": ("colocated, synchronous", "hybrid engine, synchronous (shared GPUs)", "sync, colocated"),
    "colocate sync": ("colocated, synchronous", "hybrid engine, synchronous (shared GPUs)", "sync, colocated"),
    "disaggregated sync": (
        "separated, synchronous", "non-colocated sync", "synchronous on separate GPUs"),
    "disaggregated async": ("fully asynchronous, separate GPUs", "async, non-colocated", "decoupled asynchronous"),
}  # fmt: skip


def mode_reworded(choice: int) -> Change:
    def change(case: Case) -> None:
        mode = case["config"].get("mode")
        if case["category"] == "rl_step" and mode in MODES:
            case["config"]["mode"] = MODES[mode][choice]

    return change


CHANGES: dict[str, Change] = {
    **{f"renamed {n}": renamed(n) for n in range(3)},
    **{f"measured renamed {n}": measured_renamed(n) for n in range(3)},
    **{f"mode reworded {n}": mode_reworded(n) for n in range(3)},
    **{f"sides in prose {n}": sides_in_prose(n) for n in range(3)},
    "reversed order": reversed_order,
    "written out": written_out,
    "in thousands": in_thousands,
    "in milliseconds": in_milliseconds,
    "in minutes": in_minutes,
    "with units beside": with_units_beside,
    "device in full": device_in_full,
    "devices counted by name": devices_counted_by_name,
    "devices by nodes": devices_by_nodes,
    "model in full": model_in_full,
    "batch in prose": batch_in_prose,
    "batch as a product": batch_as_a_product,
    "lengths in prose": lengths_in_prose,
    "degrees in prose": degrees_in_prose,
}
MOST_CHANGE = 0.03


@pytest.mark.parametrize("name", CHANGES)
def test_other_words_change_no_prediction(name: str, cases: list[tuple[Case, list[float]]]) -> None:
    """Within 3 %, or refused with a reason; of what the change touches at most one in twenty is refused."""
    touched, refused, moved = 0, [], []
    for case, before in cases:
        other = copy.deepcopy(case)
        CHANGES[name](other)
        if other == case and list(other["config"]) == list(case["config"]):
            continue
        touched += 1
        after = ratios_of(other)
        if isinstance(after, str):
            assert after
            refused.append((case["id"], after))
        elif len(after) != len(before) or any(
            abs(new / old - 1) > MOST_CHANGE for new, old in zip(after, before, strict=True)
        ):
            moved.append((case["id"], before, after))
    assert touched >= 5
    assert not moved, moved[:5]
    assert len(refused) <= 0.05 * touched, refused[:5]


def test_numbers_are_read_out_of_texts() -> None:
    """Limits in k are powers of two, means are not; seconds come in any unit, and as two ends."""
    said = ("8,192", "about 20.6k (per-batch table)", "32K tokens", "16 GPUs", "~2.5k", "1.5M", "none")
    assert [figure(text) for text in said] == [8192, 20600, 32768, 16, 2500, 1.5e6, None]
    assert [seconds_of(text) for text in ("1.5 min", "2 m 30 s", "about 350 ms", "12", 7.5, "warm")] == [
        90, 150, pytest.approx(0.35), 12, 7.5, "warm",
    ]  # fmt: skip
    assert seconds_of("1.2-1.5 s") == [1.2, 1.5] and seconds_of([100, 200], "ms") == [0.1, 0.2]
    assert degrees("TP8, PP=2; expert parallelism of 16") == {"tp": 8, "pp": 2, "ep": 16}


def test_a_batch_of_updates_is_counted_where_it_is_not_named() -> None:
    """Micro batches x accumulation x copies of the model: 2 x 4 x (64 / (2 x 4)); or tokens over their length."""
    config = {"model": "Qwen3-8B", "gpus": 64, "tp": 2, "pp": 4, "mbs": 2, "grad_accum": 4, "seq_len": 4096}
    case = {"id": "x", "family": "f", "category": "train_mfu", "config": config, "measured": {}}
    assert as_read(case)["config"]["gbs"] == 64
    assert as_read({**case, "config": {**config, "global_batch_tokens": "2M"}})["config"]["gbs"] == 488


def test_shared_devices_are_those_of_both_sides() -> None:
    """A colocated publication whose devices are counted once; of two sides apart a sum tells nothing."""
    config = {"framework": "SkyRL, Megatron to vLLM", "placement": "1 node, 8 GPUs, colocated", "gpus": 8}
    case = {
        "id": "x",
        "family": "f",
        "category": "weight_sync",
        "config": config,
        "measured": {"sync_s": 1.0},
    }
    read = as_read(case)["config"]
    assert read["train_gpus"] == read["rollout_gpus"] == 8
    apart = {**config, "placement": "2 nodes, non-colocated"}
    assert "train_gpus" not in as_read({**case, "config": apart})["config"]


def test_known_names_are_not_overruled() -> None:
    """Parts, earlier states and percentiles stay what they are; a step of known seconds keeps them."""
    case = {
        "id": "x",
        "family": "f",
        "category": "weight_sync",
        "config": {},
        "measured": {"transfer_s": 1.0},
    }
    assert as_read(case)["measured"] == {"transfer_s": 1.0}
    both = {**case, "measured": {"transfer_s": 1.0, "weight_update_time_ms": 2500}}
    assert as_read(both)["measured"]["sync_s"] == 2.5
    step = {"step_p90_s": 9.0, "first_run_step_s": 8.0, "new_step_s": 7.0}
    assert as_read({**case, "category": "rl_step", "measured": step})["measured"] == step
    known = {"step_s": 5.0, "mean_step_time_min": 1.0}
    assert as_read({**case, "category": "rl_step", "measured": known})["measured"] == known


def refusal(category: str, measured: str, config: dict[str, object], **more: object) -> str:
    """Why such a case is refused; "" where it is predicted."""
    case = {
        "id": "x",
        "family": "f",
        "category": category,
        "config": config,
        "measured": {measured: 1.0},
        **more,
    }
    found = ratios_of(case)
    return found if isinstance(found, str) else ""


def test_what_nothing_published_shows_is_refused() -> None:
    """Each rule was known before the number: what the case says of itself, not how far off it is."""
    run = {
        "model": "Qwen3-8B", "gpu": "H100", "gpus": 8, "framework": "verl", "prompts_per_step": 64, "rollout_n": 8,
        "mean_response_length": 900, "max_response_length": 4096,
    }  # fmt: skip
    assert not refusal("rl_step", "step_s", run)
    assert "agent" in refusal("rl_step", "step_s", run, missing=["tool time of the sandboxes"])
    assert "agent" in refusal("rl_step", "step_s", {**run, "dataset": "SWE-Gym"}, notes="multi-turn")
    assert not refusal("rl_step", "step_s", {**run, "mode": "fully async"}, notes="multi-turn")
    assert not refusal("rl_step", "step_s", run, notes="Sweep over batch sizes.")
    assert "drafted" in refusal("rl_step", "step_s", {**run, "speculative": "EAGLE"})
    assert not refusal("rl_step", "step_s", {**run, "speculative": "off"})
    served = {
        "model": "DeepSeek-R1",
        "gpu": "H200",
        "tp": 8,
        "concurrency": 4,
        "input_length": 100,
        "output_length": 100,
    }
    assert not refusal("decode", "tpot_ms", served)
    assert "drafted" in refusal("decode", "tpot_ms", {**served, "speculation": "MTP, 3 draft tokens"})
    trained = {
        "model": "Qwen3-30B-A3B", "gpu": "H100", "gpus": 8, "framework": "torchtitan (FSDP2)", "ep": 8, "gbs": 64,
        "sequence_length": 4096,
    }  # fmt: skip
    assert not refusal("train_mfu", "tokens_per_s_per_gpu", trained)
    assert "no published run" in refusal(
        "train_mfu", "tokens_per_s_per_gpu", {**trained, "framework": "our own FSDP2 trainer"}
    )
    assert "nothing was tuned" in refusal(
        "train_mfu", "tokens_per_s_per_gpu", trained, notes="Card says not tuned."
    )


def test_what_a_step_does_is_read() -> None:
    """Epochs, log-probs that the rollout gave, no reference, and sides by their GPUs change the work."""
    run = {
        "model": "Qwen3-8B", "gpu": "H100", "gpus": 16, "framework": "verl", "prompts_per_step": 256, "rollout_n": 8,
        "mean_response_length": 900, "max_response_length": 4096,
    }  # fmt: skip

    def seconds(**config: object) -> float:
        case = {"id": "x", "family": "f", "category": "rl_step", "config": {**run, **config}}
        (found,) = compare({**case, "measured": {"step_s": 1.0}}, ASSUMPTIONS)
        return found.predicted.value

    assert seconds(ppo_epochs=2) > 1.1 * seconds()
    assert seconds(old_log_prob="taken from the rollout") < 0.97 * seconds()
    assert seconds(kl_loss="no KL") < 0.97 * seconds()
    assert seconds(lora_rank=16) < 0.98 * seconds()
    # A trainer's backend is its framework's where none is named: tensors cut by Megatron, not gathered.
    assert seconds(framework="slime") == seconds(framework="slime", train_backend="Megatron")
    # 16 sequences a GPU one at a time, 36 layers of 10 ms each; where the tokens of a micro batch are said, as said.
    small = {"gpus": 4, "prompts_per_step": 8, "mean_response_length": 200, "max_response_length": 512}
    assert seconds(**small) > seconds(**small, max_tokens_per_gpu=16384) + 3
    assert seconds(**small, framework="NeMo RL") < seconds(
        **small, framework="NeMo RL", micro_batch_per_gpu=1
    )
    apart = {"mode": "asynchronous, separate GPUs"}
    assert seconds(**apart, train_gpus=12, rollout_gpus=4) == seconds(**apart, gpu_split="12 train + 4 gen")
    assert seconds(**apart, resource_split="12:4") == seconds(**apart, gpu_split="12 train + 4 gen")
    assert (
        seconds(padding="padded (no remove_padding)") == seconds(use_remove_padding=False) > 1.05 * seconds()
    )
