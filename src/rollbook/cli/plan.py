"""`rollbook plan`: what a job will cost and which topology it should run on, before a GPU is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rollbook.planner.request import PlanRequest

ModelOption = Annotated[
    str, typer.Option("--model", help="Name in the registry, or a Hugging Face config.json or its folder.")
]
GpuOption = Annotated[str, typer.Option("--gpu", help="Accelerator, or a hardware.toml of calibrate.")]
NumGpusOption = Annotated[str, typer.Option("--num-gpus", help="GPUs of the whole job.")]
NodeOption = Annotated[int, typer.Option("--gpus-per-node", help="0: the accelerator's usual node.")]
PromptsOption = Annotated[str, typer.Option("--prompts", help="Prompts (groups) of a step.")]
GroupOption = Annotated[str, typer.Option("--group-size", help="Responses per prompt.")]
PromptTokensOption = Annotated[str, typer.Option("--prompt-tokens", help="Mean prompt, in tokens.")]
ResponseTokensOption = Annotated[
    str, typer.Option("--response-tokens", help="Mean response over all turns, in tokens.")
]
MaxResponseOption = Annotated[
    str, typer.Option("--max-response-tokens", help="Limit of a response; empty: four times the mean.")
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
TurnsOption = Annotated[float, typer.Option("--turns", help="Mean turns of a trajectory.")]
ObservationOption = Annotated[
    str, typer.Option("--observation-tokens", help="Mean tokens an environment adds after a turn.")
]
EnvOption = Annotated[float, typer.Option("--env-seconds", help="Mean seconds of one environment call.")]
EnvP99Option = Annotated[float, typer.Option("--env-p99-seconds", help="99th percentile of the same.")]
RolloutTpOption = Annotated[int, typer.Option("--rollout-tp", help="GPUs of one replica; 0: chosen.")]
DtypeOption = Annotated[
    str, typer.Option("--rollout-dtype", help="Engine weights: bfloat16, float8, or auto (tries both).")
]
OffloadOption = Annotated[
    str, typer.Option("--offload", help="Optimizer state in host memory: none, optimizer, auto (if needed).")
]
StalenessOption = Annotated[
    int, typer.Option("--max-staleness", help="Versions a trained token may be old; 0: on-policy only.")
]
ContextOption = Annotated[
    str, typer.Option("--max-context", help="Longest sequence; 0: what the model was released for.")
]
AssumeOption = Annotated[
    str, typer.Option("--assume", help="paper, default, or a TOML file that changes single numbers.")
]


def command(
    model: ModelOption,
    gpu: GpuOption = "H100",
    num_gpus: NumGpusOption = "8",
    gpus_per_node: NodeOption = 0,
    prompts: PromptsOption = "512",
    group_size: GroupOption = "16",
    prompt_tokens: PromptTokensOption = "1024",
    response_tokens: ResponseTokensOption = "4096",
    max_response_tokens: MaxResponseOption = "",
    length_sigma: SigmaOption = 0.6,
    lengths: LengthsOption = None,
    algorithm: AlgorithmOption = "grpo",
    reward: RewardOption = "rule",
    reference: ReferenceOption = True,
    proximal: ProximalOption = True,
    mini_batches: MiniBatchOption = 1,
    turns: TurnsOption = 1.0,
    observation_tokens: ObservationOption = "0",
    env_seconds: EnvOption = 0.0,
    env_p99_seconds: EnvP99Option = 0.0,
    rollout_tp: RolloutTpOption = 0,
    rollout_dtype: DtypeOption = "bfloat16",
    offload: OffloadOption = "auto",
    max_staleness: StalenessOption = 1,
    max_context: ContextOption = "0",
    assume: AssumeOption = "default",
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
    top: Annotated[int, typer.Option("--top", help="Topologies to print.")] = 6,
) -> None:
    """Predict a job's FLOPs, bytes and seconds, choose its topology, and say why.

    Example: rollbook plan --model Qwen3-32B --num-gpus 128 --response-tokens 8k --max-response-tokens 32k
    """
    from rollbook.planner.emit import EMITTERS, emitter
    from rollbook.planner.plan import make_plan

    if emit:
        emitter(emit)  # a misspelt name is told before the work
    request = request_from_options(
        model=model, gpu=gpu, num_gpus=num_gpus, gpus_per_node=gpus_per_node, prompts=prompts,
        group_size=group_size, prompt_tokens=prompt_tokens, response_tokens=response_tokens,
        max_response_tokens=max_response_tokens, length_sigma=length_sigma, lengths=lengths,
        algorithm=algorithm, reward=reward, reference=reference, proximal=proximal, mini_batches=mini_batches,
        turns=turns, observation_tokens=observation_tokens, env_seconds=env_seconds,
        env_p99_seconds=env_p99_seconds, rollout_tp=rollout_tp, rollout_dtype=rollout_dtype, offload=offload,
        max_staleness=max_staleness, max_context=max_context, assume=assume, split=split,
    )  # fmt: skip
    plan = make_plan(request, is_brief=bool(emit))
    if output is not None:
        from rollbook.planner.run_toml import run_toml

        _write(output, run_toml(plan))
    if html is not None:
        from rollbook.planner.report import html_report

        _write(html, html_report(plan))
    if emit:
        typer.echo(EMITTERS[emit](plan), nl=False)
    elif as_json:
        typer.echo(json.dumps(plan.as_json()))
    else:
        from rich.console import Console

        from rollbook.planner.show import show_plan

        console = Console(highlight=False)
        show_plan(plan, Console(highlight=False, width=min(console.width, 110)), num_topologies=top)


def request_from_options(
    *,
    model: str,
    gpu: str,
    num_gpus: str,
    gpus_per_node: int,
    prompts: str,
    group_size: str,
    prompt_tokens: str,
    response_tokens: str,
    max_response_tokens: str,
    length_sigma: float,
    lengths: Path | None,
    algorithm: str,
    reward: str,
    reference: bool,
    proximal: bool,
    mini_batches: int,
    turns: float,
    observation_tokens: str,
    env_seconds: float,
    env_p99_seconds: float,
    rollout_tp: int,
    rollout_dtype: str,
    offload: str,
    max_staleness: int,
    max_context: str,
    assume: str,
    split: str = "",
) -> PlanRequest:
    """The question that the options of `plan` and `simulate` ask.

    Raises:
        ConfigError, PlanError: a value that is no number, an unknown name, or a question that cannot be meant.
    """
    from rollbook.ledger.assumptions import load_assumptions
    from rollbook.ledger.hardware import Cluster, load_accelerator
    from rollbook.ledger.model import load_model
    from rollbook.ledger.quantity import parse_count
    from rollbook.ledger.workload import AgentWork, Workload
    from rollbook.planner.request import PlanRequest, choice_of, split_of

    mean_response = parse_count(response_tokens, what="--response-tokens")
    if max_response_tokens:
        longest = parse_count(max_response_tokens, what="--max-response-tokens")
    else:
        longest = 4 * mean_response
    workload = Workload(
        num_prompts=parse_count(prompts, what="--prompts"),
        group_size=parse_count(group_size, what="--group-size"),
        prompt_tokens=parse_count(prompt_tokens, what="--prompt-tokens"),
        response_tokens=mean_response,
        max_response_tokens=longest,
        length_sigma=length_sigma,
        length_samples=_read_lengths(lengths) if lengths else (),
        algorithm=choice_of("--algorithm", algorithm, "grpo", "ppo"),
        reward=choice_of("--reward", reward, "rule", "model", "generative", "sandbox"),
        uses_reference=reference,
        uses_proximal=proximal,
        num_mini_batches=mini_batches,
        agent=AgentWork(
            num_turns=turns,
            observation_tokens=_count_or_zero(observation_tokens, "--observation-tokens"),
            env_s=env_seconds,
            env_p99_s=env_p99_seconds,
        ),
    )
    return PlanRequest(
        model=load_model(model),
        model_path=str(Path(model).parent) if model.endswith("config.json") else model,
        workload=workload,
        cluster=Cluster(
            accelerator=load_accelerator(gpu),
            num_gpus=parse_count(num_gpus, what="--num-gpus"),
            gpus_per_node=gpus_per_node,
        ),
        assumptions=load_assumptions(assume),
        rollout_tp=rollout_tp,
        split=split_of(split) if split else None,
        rollout_dtype=choice_of("--rollout-dtype", rollout_dtype, "bfloat16", "float8", "auto"),
        offload=choice_of("--offload", offload, "none", "optimizer", "auto"),
        max_staleness_steps=max_staleness,
        max_context_tokens=_count_or_zero(max_context, "--max-context"),
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


def _count_or_zero(text: str, what: str) -> int:
    from rollbook.ledger.quantity import parse_count

    return 0 if text.strip() == "0" else parse_count(text, what=what)


def _read_lengths(path: Path) -> tuple[float, ...]:
    from rollbook.errors import ConfigError

    try:
        return tuple(float(word) for word in path.read_text().split())
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", "give a file with one length a line"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}", "write one response length in tokens on each line") from None
