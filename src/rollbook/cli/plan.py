"""`rollbook plan`: what a job will cost and which topology it should run on, before a GPU is touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollbook.ledger.quantity import require_number
from rollbook.planner.options import PlanOptions

if TYPE_CHECKING:
    from rollbook.planner.plan import Plan

DEFAULTS = PlanOptions(model="")
_TOP = 6

ModelOption = Annotated[
    str,
    typer.Option(
        "--model", help="Name in the registry (`list`: all), or a Hugging Face config.json or its folder."
    ),
]
GpuOption = Annotated[
    str, typer.Option("--gpu", help="Accelerator (`list`: all names), or a hardware.toml of calibrate.")
]
NumGpusOption = Annotated[str, typer.Option("--num-gpus", help="GPUs of the whole job.")]
NodeOption = Annotated[int, typer.Option("--gpus-per-node", help="0: the accelerator's usual node.")]
PromptsOption = Annotated[str, typer.Option("--prompts", help="Prompts (groups) of a step.")]
GroupOption = Annotated[str, typer.Option("--group-size", help="Responses per prompt.")]
PromptTokensOption = Annotated[str, typer.Option("--prompt-tokens", help="Mean prompt, in tokens.")]
ResponseTokensOption = Annotated[
    str, typer.Option("--response-tokens", help="Mean response over all turns, in tokens.")
]
MaxResponseOption = Annotated[
    str,
    typer.Option(
        "--max-response-tokens", help="Limit of a response; empty: four times the mean, within the context."
    ),
]
SigmaOption = Annotated[
    float, typer.Option("--length-sigma", help="Spread of ln(response length); 0: all equal.")
]
LengthsOption = Annotated[
    Path | None,
    typer.Option(
        "--lengths", help="File with one measured response length a line, instead of mean and sigma."
    ),
]
AlgorithmOption = Annotated[str, typer.Option("--algorithm", help="grpo (no critic) or ppo (critic).")]
RewardOption = Annotated[str, typer.Option("--reward", help="rule, model, generative or sandbox.")]
ReferenceOption = Annotated[bool, typer.Option("--reference/--no-reference", help="A KL reference policy.")]
ProximalOption = Annotated[
    bool, typer.Option("--proximal/--no-proximal", help="Recompute proximal logprobs before training.")
]
MiniBatchOption = Annotated[int, typer.Option("--mini-batches", help="Optimizer updates of a step.")]
TurnsOption = Annotated[
    float,
    typer.Option(
        "--turns", help="Mean turns (responses) of a trajectory; an environment call is between two of them."
    ),
]
ObservationOption = Annotated[
    str, typer.Option("--observation-tokens", help="Mean tokens an environment adds after a turn.")
]
EnvOption = Annotated[float, typer.Option("--env-seconds", help="Mean seconds of one environment call.")]
EnvP99Option = Annotated[float, typer.Option("--env-p99-seconds", help="99th percentile of the same.")]
EngineOption = Annotated[
    str, typer.Option("--engine", help="Family that decoding is priced as: vllm, sglang or tensorrt_llm.")
]
RolloutTpOption = Annotated[int, typer.Option("--rollout-tp", help="GPUs of one replica; 0: chosen.")]
DtypeOption = Annotated[
    str, typer.Option("--rollout-dtype", help="Engine weights: bfloat16, float8, or auto (tries both).")
]
OffloadOption = Annotated[
    str,
    typer.Option(
        "--offload", help="Training state in host memory: none, optimizer, weights (all of it), auto."
    ),
]
HostOption = Annotated[
    float,
    typer.Option(
        "--host-gb-per-gpu",
        help="Host memory that a GPU's training state may take, also while it waits there for a shared GPU.",
    ),
]
StalenessOption = Annotated[
    int, typer.Option("--max-staleness", help="Versions a trained token may be old; 0: on-policy only.")
]
RecomputeOption = Annotated[
    str, typer.Option("--recompute", help="Activations: selective, full, auto (the faster that fits).")
]
PrefixOption = Annotated[
    bool,
    typer.Option(
        "--keep-prefix/--lose-prefix",
        help="Engines keep a trajectory's KV while its environment works, or prefill all of it again.",
    ),
]
LoraRankOption = Annotated[
    int, typer.Option("--lora-rank", help="Train adapters of this rank on a frozen base; 0: all weights.")
]
LoraPublishOption = Annotated[
    str,
    typer.Option(
        "--lora-publish", help="merged (whole weights) or adapter (alone, to engines with the base)."
    ),
]
RewardModelOption = Annotated[
    str,
    typer.Option("--reward-model", help="Of --reward model or generative; empty: of the policy's shape."),
]
RewardTokensOption = Annotated[
    str, typer.Option("--reward-tokens", help="Tokens of a generative reward model's verdict.")
]
EpochsOption = Annotated[int, typer.Option("--epochs", help="Passes of training over a step's trajectories.")]
EnvP50Option = Annotated[
    float, typer.Option("--env-p50-seconds", help="Median of the same; 0: from the mean.")
]
SandboxStartOption = Annotated[
    float, typer.Option("--sandbox-start-seconds", help="Start of a trajectory's sandbox.")
]
SandboxCoresOption = Annotated[
    float, typer.Option("--cores-per-sandbox", help="CPU cores that a sandbox holds.")
]
SandboxMemoryOption = Annotated[
    float, typer.Option("--gb-per-sandbox", help="Gigabytes of memory that a sandbox holds.")
]
SharePromptsOption = Annotated[
    bool,
    typer.Option(
        "--share-prompts/--no-share-prompts", help="Members of a group share the prefill of their prompt."
    ),
]
PrefillChunkOption = Annotated[
    str,
    typer.Option(
        "--prefill-chunk",
        help="Chunked prefill: tokens of an engine's step, running sequences included; 0: prompts whole.",
    ),
]
StackOption = Annotated[
    str,
    typer.Option(
        "--stack",
        help="Trainer: fsdp, megatron, ...; empty: what the assumptions name, else what the layouts need.",
    ),
]
IdleOption = Annotated[
    str,
    typer.Option(
        "--idle-state",
        help="Training state while engines generate on its GPUs: device (stays), host (waits there), auto.",
    ),
]
SleepOption = Annotated[
    str,
    typer.Option(
        "--sleep-level",
        help="Colocated engines while the trainer works: 0 stay awake, 1 keep weights in host memory, 2 drop them, "
        "auto.",
    ),
]
RebuildOption = Annotated[
    bool,
    typer.Option(
        "--rebuild-engine/--keep-engine",
        help="KV pool and CUDA graphs are made again at each wake, or survive the sleep.",
    ),
]
ChangedOption = Annotated[
    float, typer.Option("--changed-frac", help="Share of the weights that a step changes, for a delta.")
]
ContextOption = Annotated[
    str, typer.Option("--max-context", help="Longest sequence; 0: what the model was released for.")
]
AssumeOption = Annotated[
    str,
    typer.Option(
        "--assume",
        help="default, paper, rollbook (our own loop), a measured framework such as verl, or a TOML file that "
        "changes single numbers.",
    ),
]


def command(
    model: ModelOption = "",
    gpu: GpuOption = DEFAULTS.gpu,
    num_gpus: NumGpusOption = str(DEFAULTS.num_gpus),
    gpus_per_node: NodeOption = DEFAULTS.gpus_per_node,
    prompts: PromptsOption = str(DEFAULTS.prompts),
    group_size: GroupOption = str(DEFAULTS.group_size),
    prompt_tokens: PromptTokensOption = str(DEFAULTS.prompt_tokens),
    response_tokens: ResponseTokensOption = str(DEFAULTS.response_tokens),
    max_response_tokens: MaxResponseOption = str(DEFAULTS.max_response_tokens),
    length_sigma: SigmaOption = DEFAULTS.length_sigma,
    lengths: LengthsOption = DEFAULTS.lengths,
    algorithm: AlgorithmOption = DEFAULTS.algorithm,
    reward: RewardOption = DEFAULTS.reward,
    reward_model: RewardModelOption = DEFAULTS.reward_model,
    reward_tokens: RewardTokensOption = str(DEFAULTS.reward_tokens),
    reference: ReferenceOption = DEFAULTS.reference,
    proximal: ProximalOption = DEFAULTS.proximal,
    mini_batches: MiniBatchOption = DEFAULTS.mini_batches,
    epochs: EpochsOption = DEFAULTS.epochs,
    turns: TurnsOption = DEFAULTS.turns,
    observation_tokens: ObservationOption = str(DEFAULTS.observation_tokens),
    env_seconds: EnvOption = DEFAULTS.env_seconds,
    env_p50_seconds: EnvP50Option = DEFAULTS.env_p50_seconds,
    env_p99_seconds: EnvP99Option = DEFAULTS.env_p99_seconds,
    sandbox_start_seconds: SandboxStartOption = DEFAULTS.sandbox_start_seconds,
    cores_per_sandbox: SandboxCoresOption = DEFAULTS.cores_per_sandbox,
    gb_per_sandbox: SandboxMemoryOption = DEFAULTS.gb_per_sandbox,
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            help="Family that decoding is priced as: vllm, sglang or tensorrt_llm; empty: of what -o or --emit writes "
            "for, else vllm.",
        ),
    ] = "",
    rollout_tp: RolloutTpOption = DEFAULTS.rollout_tp,
    rollout_dtype: DtypeOption = DEFAULTS.rollout_dtype,
    offload: OffloadOption = DEFAULTS.offload,
    host_gb_per_gpu: HostOption = DEFAULTS.host_gb_per_gpu,
    recompute: RecomputeOption = DEFAULTS.recompute,
    keep_prefix: PrefixOption = DEFAULTS.keep_prefix,
    share_prompts: SharePromptsOption = DEFAULTS.share_prompts,
    prefill_chunk: PrefillChunkOption = str(DEFAULTS.prefill_chunk),
    stack: StackOption = DEFAULTS.stack,
    idle_state: IdleOption = DEFAULTS.idle_state,
    sleep_level: SleepOption = str(DEFAULTS.sleep_level),
    rebuild_engine: RebuildOption = DEFAULTS.rebuild_engine,
    changed_frac: ChangedOption = DEFAULTS.changed_frac,
    max_staleness: StalenessOption = DEFAULTS.max_staleness,
    lora_rank: LoraRankOption = DEFAULTS.lora_rank,
    lora_publish: LoraPublishOption = DEFAULTS.lora_publish,
    checkpoint_every: Annotated[
        int, typer.Option("--checkpoint-every", help="Steps between checkpoints; 0: about one an hour.")
    ] = DEFAULTS.checkpoint_every,
    checkpoint_async: Annotated[
        bool,
        typer.Option(
            "--checkpoint-async/--checkpoint-sync",
            help="Write from a copy in pinned host memory while training goes on.",
        ),
    ] = DEFAULTS.checkpoint_async,
    storage_gb_per_s: Annotated[
        float, typer.Option("--storage-gb-per-s", help="Gigabytes a second of the job's storage; 0: assumed.")
    ] = DEFAULTS.storage_gb_per_s,
    lend: Annotated[
        float, typer.Option("--lend", help="Lend waiting training GPUs to generation; seconds of a switch.")
    ] = DEFAULTS.lend,
    length_growth: Annotated[
        float,
        typer.Option(
            "--length-growth", help="Growth of the mean response a step: shows what moves, and when."
        ),
    ] = DEFAULTS.length_growth,
    horizon: Annotated[
        int, typer.Option("--horizon", help="Steps of the run, over which responses may grow.")
    ] = DEFAULTS.horizon,
    max_context: ContextOption = str(DEFAULTS.max_context),
    assume: Annotated[
        str,
        typer.Option(
            "--assume",
            help="default, paper, rollbook (our own loop), a measured framework such as verl, or a TOML file that "
            "changes single numbers; empty: of the loop that -o or --emit writes for, else default.",
        ),
    ] = "",
    split: Annotated[
        str, typer.Option("--split", help="Also evaluate this split, as rollout:train GPUs, such as 40:24.")
    ] = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a run.toml that `rollbook train` runs.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a self-contained page.")] = None,
    emit: Annotated[
        str, typer.Option("--emit", help="Print the plan for verl, slime, areal, ray or kubernetes.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    top: Annotated[int, typer.Option("--top", help="Topologies to print.")] = _TOP,
) -> None:
    """Predict a job's FLOPs, bytes and seconds, choose its topology, and say why.

    Exit code 1 (2 with -o or --emit): nothing fits.

    Example: rollbook plan --model Qwen3-32B --num-gpus 128 --response-tokens 8k --max-response-tokens 32k
    """
    from rollbook.errors import PlanError
    from rollbook.planner.emit_targets import TRAINS_WITH, engine_written
    from rollbook.planner.plan import make_plan

    if lists_names(model, gpu, as_json=as_json):
        return
    require_number("--top", top, least=1, remedy="give at least 1: the topologies to print")
    if emit and as_json:
        raise PlanError("--json beside --emit: one of the two is printed", "leave one of them out")
    if top != _TOP and (emit or as_json):
        raise PlanError(f"--top is {top} and no table is printed", "leave out --top, or --json and --emit")
    # What is misspelt is told before the work.
    write = _emitter(emit) if emit else None
    for path in (output, html):
        _require_place(path)
    assumed = assume or _loop_of(output, emit)
    options = PlanOptions(
        model=model, gpu=gpu, num_gpus=num_gpus, gpus_per_node=gpus_per_node, prompts=prompts,
        group_size=group_size, prompt_tokens=prompt_tokens, response_tokens=response_tokens,
        max_response_tokens=max_response_tokens, length_sigma=length_sigma, lengths=lengths,
        algorithm=algorithm, reward=reward, reference=reference, proximal=proximal, mini_batches=mini_batches,
        turns=turns, observation_tokens=observation_tokens, env_seconds=env_seconds,
        env_p99_seconds=env_p99_seconds, engine=engine_written(engine, emit, writes_config=output is not None),
        rollout_tp=rollout_tp, rollout_dtype=rollout_dtype, offload=offload,
        host_gb_per_gpu=host_gb_per_gpu,
        max_staleness=max_staleness, lora_rank=lora_rank, lora_publish=lora_publish,
        recompute=recompute, keep_prefix=keep_prefix,
        checkpoint_every=checkpoint_every, checkpoint_async=checkpoint_async, storage_gb_per_s=storage_gb_per_s,
        max_context=max_context, assume=assumed, split=split, reward_model=reward_model,
        reward_tokens=reward_tokens, epochs=epochs, env_p50_seconds=env_p50_seconds,
        sandbox_start_seconds=sandbox_start_seconds, cores_per_sandbox=cores_per_sandbox,
        gb_per_sandbox=gb_per_sandbox,
        share_prompts=share_prompts, prefill_chunk=prefill_chunk, stack=stack or TRAINS_WITH.get(emit, ""),
        idle_state=idle_state, sleep_level=sleep_level, rebuild_engine=rebuild_engine,
        changed_frac=changed_frac, lend=lend,
        length_growth=length_growth,
        horizon=horizon,
    )  # fmt: skip
    plan = make_plan(options.request(), is_brief=bool(emit))
    if output is not None:
        from rollbook.planner.run_toml import run_toml

        _write(output, run_toml(plan))
    if html is not None:
        from rollbook.planner.report import html_report

        _write(html, html_report(plan))
    if write is not None:
        typer.echo(write(plan), nl=False)
    elif as_json:
        typer.echo(json.dumps(plan.as_json()))
    else:
        from rich.console import Console

        from rollbook.planner.show import show_plan

        console = Console(highlight=False)
        show_plan(plan, Console(highlight=False, width=min(console.width, 110)), num_topologies=top)
    if plan.chosen is None:
        raise typer.Exit(1)
    if assumed not in (assume, DEFAULTS.assume):
        typer.echo(
            f"note: priced as {assumed}'s own loop, which runs what is written (--assume {assumed}); --assume "
            f"{DEFAULTS.assume} has the usual costs of a framework",
            err=True,
        )
    if output is not None and plan.chosen is not None:
        _tell_what_cannot_run(plan)


def lists_names(model: str, gpu: str, *, as_json: bool = False) -> bool:
    """Whether one of both asks for its names, which are then printed."""
    from rollbook.ledger.hardware import accelerator_names
    from rollbook.ledger.model import model_names

    asked = {
        "gpus": accelerator_names if gpu == "list" else None,
        "models": model_names if model == "list" else None,
    }
    told = {kind: names() for kind, names in asked.items() if names is not None}
    if told:
        every = [name for names in told.values() for name in names]
        typer.echo(json.dumps(told) if as_json else "\n".join(every))
    return bool(told)


def _tell_what_cannot_run(plan: Plan) -> None:
    from rollbook.planner.execution import execution

    if why := execution(plan.request, plan.require_chosen()).why_not:
        typer.echo(
            f"note: `rollbook train` cannot run the file: a trainer is one process on one GPU; {why}",
            err=True,
        )


def _emitter(name: str) -> Callable[[Plan], str]:
    from rollbook.planner.emit import emitter

    return emitter(name)


def _loop_of(output: Path | None, emit: str) -> str:
    """Assumptions of the loop that will run what is written; the default where nothing, or for several, is."""
    from rollbook.planner.emit_targets import LOOPS

    loops = {LOOPS.get(emit, DEFAULTS.assume)} if emit else set[str]()
    loops |= {"rollbook"} if output is not None else set[str]()
    return loops.pop() if len(loops) == 1 else DEFAULTS.assume


def _require_place(path: Path | None) -> None:
    """Raises ConfigError where no file can be."""
    from rollbook.errors import ConfigError

    if path is not None and path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder", "choose a file in it")
    if path is not None and not path.parent.is_dir():
        raise ConfigError(
            f"cannot write {path}: there is no folder {path.parent}", "choose a file in a folder that exists"
        )


def _write(path: Path, text: str) -> None:
    from rollbook.errors import ConfigError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", "choose a file in a folder that exists"
        ) from None
    typer.echo(f"wrote {path}", err=True)
