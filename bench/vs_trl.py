"""The same GRPO job with TRL's GRPOTrainer (Hugging Face generation) and with rollbook, alternating.

    python bench/vs_trl.py                        # both cases, about nine minutes on two quiet cores
    python bench/vs_trl.py --case short --rounds 5
    python bench/vs_trl.py --trl-dtype fp32 --threads 1 --json result.json

Needs trl in the environment (developed with 1.16, torch 2.13, transformers 5.19). Every measurement is a fresh
process of this environment; the two take turns, so that a change of the machine's load meets both.

The job: one Llama-type model of 4.2 million parameters with random weights, made once and loaded by both from the
same Hugging Face folder; 32 prompts of 16 tokens x 8 responses a step, one optimizer update a step, GRPO's
group-normalized advantages, dapo's token mean, no KL term and no reference model, the same reward function.

    short   every response has 24 tokens
    tail    log-normal lengths, mean 64, at most 512 tokens

Lengths are drawn in advance from the case, the step and the row, the same for both: a logits processor gives TRL's
generate the end-of-sequence token at that length and never before; rollbook's requests carry the length as their
limit and ignore the end of sequence. So both sample and train exactly the same number of tokens.

What is measured, in each process: a step from the end of the one before to its own end, in wall seconds and in CPU
seconds (which other work on the machine disturbs less); generation (TRL: `model.generate` alone; rollbook: the
whole stage, rewards included); the process's peak resident memory (VmHWM, before the floor is measured); start-up
from the creation of the process to the beginning of the first step. The floor of a step is 6N FLOPs a trained
token and 2N a generated one over the rate of a 2048 x 2048 matrix product of the same dtype, measured in the same
process at its end.

TRL runs as fast as it could be made to: no gradient checkpointing (its default), nothing saved, weights in
bfloat16 without autocast unless --trl-dtype says otherwise, the batch in --trl-micro-batches parts. rollbook keeps its
defaults
(weights proven and probed each step, trajectories and metrics written, float32 master weights), except that
nothing is predicted ([plan] is_on = false), because that calibrates the machine for some seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NUM_PROMPTS, GROUP_SIZE, PROMPT_TOKENS = 32, 8, 16
NUM_ROWS = NUM_PROMPTS * GROUP_SIZE
VOCAB_SIZE = 4096
PAD, EOS, FIRST_WORD = 0, 1, 2
CASES: dict[str, tuple[int, int]] = {"short": (24, 5), "tail": (512, 3)}
"""Longest response; steps of a process, of which the first and the last are not counted."""


def lengths(case: str, step: int) -> list[int]:
    """Response tokens of every row of a step, group by group."""
    import numpy as np

    longest = CASES[case][0]
    if case == "short":
        return [longest] * NUM_ROWS
    spread = 1.0  # of ln(length); cutting at 512 lowers the mean by 3 %, which the location makes up for
    location = np.log(64 * 1.03) - spread**2 / 2
    drawn = np.random.default_rng([64, step]).lognormal(location, spread, NUM_ROWS)
    return [int(n) for n in drawn.round().clip(1, longest)]


def reward(response: str, task: Mapping[str, Any]) -> float:
    """Share of even words; called as rollbook calls a reward, and by `reward_all` as TRL does."""
    words = response.split()
    return sum(word[-1] in "02468" for word in words) / max(len(words), 1)


def reward_all(completions: list[str], **_: Any) -> list[float]:
    return [reward(completion, {}) for completion in completions]


# ---- one process -----------------------------------------------------------------------------------------


@dataclass
class Readings:
    """What a process reports."""

    started_at_s: float
    """Monotonic clock of the machine, when the parent created the process."""
    startup_s: float = 0.0
    startup_cpu_s: float = 0.0
    marks: list[tuple[float, float]] = field(default_factory=list)
    """(wall, CPU) seconds at the beginning of the first step and at the end of each."""
    generation_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Response tokens of each step."""

    def begin(self) -> None:
        self.startup_s = time.monotonic() - self.started_at_s
        self.startup_cpu_s = _cpu_s()
        self.mark()

    def mark(self) -> None:
        self.marks.append((time.monotonic(), _cpu_s()))

    def as_json(self, num_parameters: int, dtype: str) -> dict[str, Any]:
        peak_bytes = _peak_bytes()
        chosen = range(1, len(self.tokens) - 1)  # the first warms up, the last may save
        flops = [8 * num_parameters * self.tokens[i] for i in chosen]
        flops_per_s = gemm_flops_per_s(dtype)
        return {
            "startup_s": self.startup_s,
            "startup_cpu_s": self.startup_cpu_s,
            "peak_bytes": peak_bytes,
            "step_s": [self.marks[i + 1][0] - self.marks[i][0] for i in chosen],
            "step_cpu_s": [self.marks[i + 1][1] - self.marks[i][1] for i in chosen],
            "generation_s": [self.generation_s[i] for i in chosen],
            "tokens": [self.tokens[i] for i in chosen],
            "floor_s": [f / flops_per_s for f in flops],
            "gemm_flops_per_s": flops_per_s,
        }


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM: this benchmark needs Linux")


def gemm_flops_per_s(dtype: str) -> float:
    """Best of some products of 2048 x 2048 matrices: what this machine gives just now."""
    import torch

    a, b = (torch.randn(2048, 2048).to(getattr(torch, dtype)) for _ in range(2))
    a @ b
    taken = []
    for _ in range(8):
        began = time.perf_counter()
        a @ b
        taken.append(time.perf_counter() - began)
    return float(2 * 2048**3 / min(taken))


def prepare(folder: Path) -> int:
    """Write model, tokenizer and prompts; returns the number of parameters."""
    import numpy as np
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(FIRST_WORD, VOCAB_SIZE))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        folder
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            pad_token_id=PAD,
            eos_token_id=EOS,
        )
    )
    model.save_pretrained(folder)
    draws = np.random.default_rng(0)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(NUM_PROMPTS * 16):
            prompt = " ".join(words[i] for i in draws.integers(FIRST_WORD, VOCAB_SIZE, PROMPT_TOKENS))
            file.write(json.dumps({"prompt": prompt, "answer": ""}) + "\n")
    return sum(p.numel() for p in model.parameters())


def run_trl(args: argparse.Namespace, readings: Readings) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from datasets import Dataset
    from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    longest, num_steps = CASES[args.case]

    class FixedLengths(LogitsProcessor):  # type: ignore[misc]
        """End of sequence exactly at each row's drawn length."""

        def __init__(self, wanted: Sequence[int]) -> None:
            self.wanted = torch.tensor(wanted)

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            ends = self.wanted == input_ids.shape[1] - PROMPT_TOKENS + 1
            scores[:, EOS] = -torch.inf
            scores[ends] = -torch.inf
            scores[ends, EOS] = 0.0
            return scores

    class Marks(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            readings.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            readings.mark()

    rows = [json.loads(line) for line in (args.folder / "prompts.jsonl").read_text().splitlines()]
    dtype = "bfloat16" if args.trl_dtype == "bf16" else "float32"
    config = GRPOConfig(
        output_dir=str(args.folder / "trl"),
        per_device_train_batch_size=NUM_ROWS // args.trl_micro_batches,
        gradient_accumulation_steps=args.trl_micro_batches,
        num_generations=GROUP_SIZE,
        max_completion_length=longest,
        max_steps=num_steps,
        learning_rate=1e-6,
        loss_type="dapo",
        beta=0.0,
        bf16=args.trl_dtype == "autocast",
        model_init_kwargs={"dtype": dtype},
        gradient_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(
        model=str(args.folder),
        reward_funcs=reward_all,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[Marks()],
    )
    generate = trainer.model.generate

    def timed_generate(*given: Any, **named: Any) -> torch.Tensor:
        wanted = lengths(args.case, len(readings.tokens))
        readings.tokens.append(sum(wanted))
        began = time.monotonic()
        ids: torch.Tensor = generate(
            *given, **named, logits_processor=LogitsProcessorList([FixedLengths(wanted)])
        )
        readings.generation_s.append(time.monotonic() - began)
        found = ((ids[:, PROMPT_TOKENS:] == EOS).int().argmax(1) + 1).tolist()
        if found != wanted:
            raise RuntimeError(f"TRL's responses have lengths {found}, not {wanted}")
        return ids

    trainer.model.generate = timed_generate
    with contextlib.redirect_stdout(sys.stderr):
        trainer.train()


ROLLBOOK = """
[run]
name = "rollbook"
dir = "{folder}"
num_steps = {num_steps}
groups_per_step = {num_prompts}
[model]
path = "{folder}"
dtype = "{dtype}"
[[data.sources]]
path = "{folder}/prompts.jsonl"
name = "words"
[[reward.terms]]
function = "vs_trl:reward"
isolation = "inline"
[reward]
self_test_prompts = 0
[rollout]
group_size = {group_size}
max_response_tokens = {longest}
num_slots = {num_rows}
kv_pool_tokens = {pool_tokens}
num_threads = {threads}
[algorithm]
name = "grpo"
aggregation = "token_mean"
[trainer]
lr = 1e-6
num_threads = {threads}
[plan]
is_on = false
"""


def run_rollbook(args: argparse.Namespace, readings: Readings) -> None:
    from dataclasses import replace

    from rollbook.controller.entry import start_run
    from rollbook.observe.recorder import Recorder
    from rollbook.observe.spans import Span
    from rollbook.rollout.engine import GenerateRequest, Response
    from rollbook.rollout.router import Router

    longest, num_steps = CASES[args.case]
    path = args.folder / "rollbook.toml"
    path.write_text(
        ROLLBOOK.format(
            folder=args.folder,
            num_steps=num_steps,
            num_prompts=NUM_PROMPTS,
            group_size=GROUP_SIZE,
            num_rows=NUM_ROWS,
            longest=longest,
            pool_tokens=NUM_ROWS * 64 if args.case == "short" else 49152,
            dtype="bfloat16" if args.rollbook_dtype == "bf16" else "float32",
            threads=args.threads,
        )
    )
    plain_generate, plain_step = Router.generate, Recorder.step

    async def generate(self: Router, request: GenerateRequest) -> Response:
        step, group = divmod(request.group_id, NUM_PROMPTS)
        wanted = 1 if step < 0 else drawn(step)[group * GROUP_SIZE + request.member_idx]
        sampling = replace(request.sampling, max_response_tokens=wanted, ignore_eos=True)
        response = await plain_generate(self, replace(request, sampling=sampling))
        if len(response.response_ids) != wanted:
            raise RuntimeError(f"rollbook's response has {len(response.response_ids)} tokens, not {wanted}")
        return response

    held: dict[int, list[int]] = {}

    def drawn(step: int) -> list[int]:
        if step not in held:
            held[step] = lengths(args.case, step)
        return held[step]

    @contextlib.contextmanager
    def step(self: Recorder, number: int) -> Iterator[Span]:
        if not readings.marks:
            readings.begin()
        with plain_step(self, number) as span:
            yield span
        readings.tokens.append(sum(drawn(number)))
        readings.mark()

    Router.generate, Recorder.step = generate, step  # type: ignore[method-assign]
    run_dir = start_run(path, args.set)
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        readings.generation_s.append(json.loads(line)["data"]["timing_s/gen"])


# ---- the driver ------------------------------------------------------------------------------------------


def start(who: str, case: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A fresh process that works in `folder`; its report."""
    out = folder / "report.json"
    command = [sys.executable, str(Path(__file__).resolve()), "--child", who, "--case", case]
    command += ["--folder", str(folder), "--out", str(out), "--threads", str(args.threads)]
    command += ["--trl-dtype", args.trl_dtype, "--rollbook-dtype", args.rollbook_dtype]
    command += ["--trl-micro-batches", str(args.trl_micro_batches)]
    command += [f"--set={item}" for item in args.set]
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    env["PYTHONPATH"] = str(Path(__file__).resolve().parent)
    command += ["--started-at-s", str(time.monotonic())]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{who} failed on {case}:\n{done.stderr[-4000:]}")
    return dict(json.loads(out.read_text()))


def measure(who: str, case: str, args: argparse.Namespace, prepared: Path) -> dict[str, Any]:
    """One side, in a folder of its own with the files of `prepared`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for file in prepared.iterdir():
            (folder / file.name).symlink_to(file)
        (folder / "report.json").unlink(missing_ok=True)
        return start(who, case, args, folder)


def child(args: argparse.Namespace) -> None:
    if args.child == "prepare":
        args.out.write_text(json.dumps({"num_parameters": prepare(args.folder)}))
        return
    readings = Readings(args.started_at_s)
    (run_trl if args.child == "trl" else run_rollbook)(args, readings)
    chosen = args.trl_dtype if args.child == "trl" else args.rollbook_dtype
    num_parameters = json.loads((args.folder / "facts.json").read_text())["num_parameters"]
    report = readings.as_json(num_parameters, "float32" if chosen == "fp32" else "bfloat16")
    args.out.write_text(json.dumps(report))


Reading = tuple[str, Callable[[dict[str, Any]], float], bool, str]
READINGS: tuple[Reading, ...] = (
    # name, of one process's report, whether more is better, format
    ("samples/s, whole step", lambda r: NUM_ROWS / statistics.median(r["step_s"]), True, ".1f"),
    ("samples/CPU-s, whole step", lambda r: NUM_ROWS / statistics.median(r["step_cpu_s"]), True, ".1f"),
    ("generated tokens/s", lambda r: sum(r["tokens"]) / sum(r["generation_s"]), True, ".0f"),
    ("share of the floor reached", lambda r: sum(r["floor_s"]) / sum(r["step_s"]), True, ".3f"),
    ("peak memory, GiB", lambda r: r["peak_bytes"] / 2**30, False, ".3f"),
    ("start-up, s", lambda r: r["startup_s"], False, ".2f"),
    ("start-up, CPU-s", lambda r: r["startup_cpu_s"], False, ".2f"),
)


def table(case: str, trl: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print one case; returns the rows."""
    gemm = [statistics.median(r["gemm_flops_per_s"] for r in side) / 1e9 for side in (trl, ours)]
    mean = statistics.mean(n for r in ours for n in r["tokens"]) / NUM_ROWS
    print(f"\n{case}: {NUM_ROWS} responses a step, {mean:.1f} tokens on average; ", end="")
    print(f"GEMM {gemm[0]:.0f} (TRL's dtype), {gemm[1]:.0f} GFLOP/s (rollbook's)")
    print(f"{'':28}{'TRL':>26}{'rollbook':>26}   better by")
    rows = []
    for name, read, more, form in READINGS:
        sides = [sorted(read(r) for r in side) for side in (trl, ours)]
        medians = [statistics.median(side) for side in sides]
        pairs = [b / a if more else a / b for a, b in ((read(x), read(y)) for x, y in zip(trl, ours))]
        ratio = statistics.median(pairs)
        shown = [f"{m:{form}} ({s[0]:{form}} to {s[-1]:{form}})" for m, s in zip(medians, sides)]
        print(f"{name:28}{shown[0]:>26}{shown[1]:>26}   {ratio:.2f} ({min(pairs):.2f} to {max(pairs):.2f})")
        rows.append({"case": case, "reading": name, "trl": sides[0], "rollbook": sides[1], "ratios": pairs})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side, alternating")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--trl-dtype", choices=["bf16", "autocast", "fp32"], default="bf16")
    parser.add_argument("--trl-micro-batches", type=int, default=1, help="parts of TRL's batch of 256")
    parser.add_argument("--rollbook-dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--set", action="append", default=[], help="override of rollbook's config: key=value")
    parser.add_argument("--json", type=Path, help="also write every reading here")
    for name in ("--child", "--folder", "--out", "--started-at-s"):
        kind = {"--folder": Path, "--out": Path, "--started-at-s": float}.get(name, str)
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    cases = list(CASES) if args.case == "all" else [args.case]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        facts = start("prepare", cases[0], args, folder)
        (folder / "facts.json").write_text(json.dumps(facts))
        rows: list[dict[str, Any]] = []
        for case in cases:
            trl, ours = [], []
            for _ in range(args.rounds):
                trl.append(measure("trl", case, args, folder))
                ours.append(measure("rollbook", case, args, folder))
            rows += table(case, trl, ours)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
