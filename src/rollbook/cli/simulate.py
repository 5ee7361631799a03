"""`rollbook simulate`: a topology event by event, where sums and averages are not exact."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollbook.cli.plan import (
    DEFAULTS,
    AlgorithmOption,
    AssumeOption,
    ChangedOption,
    ContextOption,
    DtypeOption,
    EngineOption,
    EnvOption,
    EnvP50Option,
    EnvP99Option,
    EpochsOption,
    GpuOption,
    GroupOption,
    HostOption,
    IdleOption,
    LengthsOption,
    LoraPublishOption,
    LoraRankOption,
    MaxResponseOption,
    MiniBatchOption,
    ModelOption,
    NodeOption,
    NumGpusOption,
    ObservationOption,
    OffloadOption,
    PrefillChunkOption,
    PrefixOption,
    PromptsOption,
    PromptTokensOption,
    ProximalOption,
    RebuildOption,
    RecomputeOption,
    ReferenceOption,
    ResponseTokensOption,
    RewardModelOption,
    RewardOption,
    RewardTokensOption,
    RolloutTpOption,
    SandboxCoresOption,
    SandboxMemoryOption,
    SandboxStartOption,
    SharePromptsOption,
    SigmaOption,
    SleepOption,
    StackOption,
    StalenessOption,
    TurnsOption,
    lists_names,
)
from rollbook.planner.options import Bounds, PlanOptions, option_name

if TYPE_CHECKING:
    from rollbook.planner.candidate import Candidate
    from rollbook.planner.request import PlanRequest
    from rollbook.planner.sim_result import SimResult


BOUNDS: dict[str, Bounds] = {
    "steps": Bounds(least=0, most=100_000, remedy="give at least 1, or 0: enough for steady averages"),
    "seed": Bounds(least=0, most=2**63 - 1, remedy="give a whole number of 0 or more"),
    "sync_every": Bounds(least=1, most=1e6, remedy="give at least 1 update between two publications"),
    "lend": Bounds(least=0, most=1e6, remedy="give the seconds of a switch, or 0 to lend nothing"),
    "failure_frac": Bounds(least=0, most=0.99, remedy="give a share between 0 and 0.99"),
    "replica_mtbf_hours": Bounds(least=0, most=1e6, remedy="give hours between failures, or 0: never"),
    "replica_recovery_seconds": Bounds(least=0, most=1e6, remedy="give 0 or more seconds"),
    "length_growth": Bounds(
        least=-0.5, most=0.5, remedy="give a growth a step between -0.5 and 0.5, such as 0.01"
    ),
}
"""Of the numbers that only a simulation has, by option."""

_RECOVERY_S = 120.0
_MOST_FAILURES_PER_STEP = 100


def command(
    model: ModelOption,
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
    engine: EngineOption = DEFAULTS.engine,
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
    max_context: ContextOption = str(DEFAULTS.max_context),
    assume: AssumeOption = DEFAULTS.assume,
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            help="sync, colocate_async, separate_sync or separate_async; empty: the recommended one.",
        ),
    ] = "",
    split: Annotated[
        str, typer.Option("--split", help="Rollout:train GPUs of a separated mode; empty: the best one.")
    ] = "",
    steps: Annotated[int, typer.Option("--steps", help="Steps; 0: enough for steady averages.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of the lengths, environments and failures.")] = 0,
    take: Annotated[str, typer.Option("--take", help="Order of a step's groups: admission or arrival.")] = (
        "admission"
    ),
    on_stale: Annotated[
        str, typer.Option("--on-stale", help="In arrival order: drop groups that are too old, or wait.")
    ] = "drop",
    on_publish: Annotated[
        str, typer.Option("--on-publish", help="Running responses at a publication: keep, drain or abort.")
    ] = "keep",
    recompute_kv: Annotated[
        bool, typer.Option("--recompute-kv", help="Prefill running responses again under new weights.")
    ] = False,
    sync_every: Annotated[int, typer.Option("--sync-every", help="Updates between publications.")] = 1,
    lend: Annotated[
        float, typer.Option("--lend", help="Lend waiting training GPUs to generation; seconds of a switch.")
    ] = 0.0,
    failure_frac: Annotated[
        float, typer.Option("--failure-frac", help="Share of trajectories that fail without a reward.")
    ] = 0.0,
    replica_mtbf_hours: Annotated[
        float,
        typer.Option("--replica-mtbf-hours", help="Mean hours between failures of one replica; 0: never."),
    ] = 0.0,
    replica_recovery_seconds: Annotated[
        float, typer.Option("--replica-recovery-seconds", help="Until a failed replica serves again.")
    ] = _RECOVERY_S,
    length_growth: Annotated[
        float, typer.Option("--length-growth", help="Growth of the responses a step, such as 0.01.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate a topology event by event on a length distribution, beside the closed form.

    Example: rollbook simulate --model Qwen3-8B --num-gpus 32 --mode separate_async --split 16:16
    """
    from rollbook.errors import PlanError
    from rollbook.ledger.step import is_colocated
    from rollbook.planner.cautions import idle_by_split, without_effect
    from rollbook.planner.request import choice_of
    from rollbook.planner.scenario import scenario_of, with_lending
    from rollbook.planner.simulate import simulate
    from rollbook.planner.words import device_words, seconds

    if lists_names(model, gpu, as_json=as_json):
        return
    numbers = {
        "steps": steps, "seed": seed, "sync_every": sync_every, "lend": lend, "failure_frac": failure_frac,
        "replica_mtbf_hours": replica_mtbf_hours, "replica_recovery_seconds": replica_recovery_seconds,
        "length_growth": length_growth,
    }  # fmt: skip
    for name, bounds in BOUNDS.items():
        bounds.check(option_name(name), numbers[name])
    if mode:
        choice_of("--mode", mode, "sync", "colocate_async", "separate_sync", "separate_async")
    is_shared = mode in ("sync", "colocate_async")
    _refuse_if("--split", bool(split) and is_shared, f"--mode {mode} shares all GPUs", "a separated mode")
    _refuse_if("--lend", lend > 0 and is_shared, f"--mode {mode} has no GPUs to lend", "a separated mode")
    _refuse_if(
        "--on-stale", on_stale != "drop" and take != "arrival", "groups of a step are fixed", "--take arrival"
    )
    _refuse_if(
        "--replica-recovery-seconds",
        replica_recovery_seconds != _RECOVERY_S and replica_mtbf_hours == 0,
        "no replica fails",
        "--replica-mtbf-hours",
    )
    options = PlanOptions(
        model=model, gpu=gpu, num_gpus=num_gpus, gpus_per_node=gpus_per_node, prompts=prompts,
        group_size=group_size, prompt_tokens=prompt_tokens, response_tokens=response_tokens,
        max_response_tokens=max_response_tokens, length_sigma=length_sigma, lengths=lengths,
        algorithm=algorithm, reward=reward, reference=reference, proximal=proximal, mini_batches=mini_batches,
        turns=turns, observation_tokens=observation_tokens, env_seconds=env_seconds,
        env_p99_seconds=env_p99_seconds, engine=engine, rollout_tp=rollout_tp, rollout_dtype=rollout_dtype,
        offload=offload, host_gb_per_gpu=host_gb_per_gpu,
        max_staleness=max_staleness, lora_rank=lora_rank, lora_publish=lora_publish,
        recompute=recompute, keep_prefix=keep_prefix,
        max_context=max_context, assume=assume, split=split, reward_model=reward_model,
        reward_tokens=reward_tokens, epochs=epochs, env_p50_seconds=env_p50_seconds,
        sandbox_start_seconds=sandbox_start_seconds, cores_per_sandbox=cores_per_sandbox,
        gb_per_sandbox=gb_per_sandbox,
        share_prompts=share_prompts, prefill_chunk=prefill_chunk, stack=stack,
        idle_state=idle_state, sleep_level=sleep_level, rebuild_engine=rebuild_engine,
        changed_frac=changed_frac, lend=lend,
    )  # fmt: skip
    request = options.request()
    candidate = _candidate(request, mode)
    idle = [(option, why) for option, why in without_effect(request, candidate) if option != "--lend"]
    if lend > 0 and is_colocated(candidate.mode):
        idle.append(
            ("--lend", "engine and trainer share their GPUs (--mode separate_async has some to lend)")
        )
    for option, why in idle:
        typer.echo(f"note: {option} changes nothing of what is simulated: {why}", err=True)
    for note in idle_by_split(request):
        typer.echo(f"note: {note}", err=True)
    least_h = candidate.step_s / _MOST_FAILURES_PER_STEP / 3600
    if 0 < replica_mtbf_hours < least_h:
        raise PlanError(
            f"--replica-mtbf-hours is {replica_mtbf_hours:g} where a step takes {seconds(candidate.step_s)}: "
            f"each replica would fail more than {_MOST_FAILURES_PER_STEP} times a step",
            f"give 0 (never), or at least {1.1 * least_h:.2g}",
        )
    scenario = replace(
        scenario_of(request, candidate, num_steps=steps),
        seed=seed,
        take=take,
        on_stale=on_stale,
        on_publish=on_publish,
        recomputes_kv=recompute_kv,
        sync_every=sync_every,
        trajectory_failure_frac=failure_frac,
        replica_mtbf_s=replica_mtbf_hours * 3600 if replica_mtbf_hours > 0 else float("inf"),
        replica_recovery_s=replica_recovery_seconds,
        length_growth_frac=length_growth,
    )
    if lend > 0 and not is_colocated(candidate.mode):
        scenario = with_lending(scenario, candidate, lend)
    result = simulate(scenario)
    if as_json:
        typer.echo(json.dumps(_json(result, candidate)))
        return
    from rich.console import Console

    from rollbook.planner.show_simulation import show_simulation

    console = Console(highlight=False)
    with console.capture() as captured:
        show_simulation(result, candidate, console)
    is_cpu = request.cluster.accelerator.is_cpu
    typer.echo(device_words(captured.get(), is_cpu=is_cpu), nl=False, color=console.is_terminal)


def _refuse_if(option: str, is_idle: bool, because: str, remedy: str) -> None:
    """Raises PlanError for an option that the others leave without effect: its value would be ignored."""
    from rollbook.errors import PlanError

    if is_idle:
        raise PlanError(f"{option} has no effect: {because}", f"leave it out, or give {remedy}")


def _candidate(request: PlanRequest, mode: str) -> Candidate:
    """The asked-for topology, or the recommended one.

    Raises:
        PlanError: the mode does not fit, with the reason.
    """
    from rollbook.errors import PlanError
    from rollbook.planner.plan import make_plan

    plan = make_plan(request, is_brief=True)
    if request.split is not None and not mode:
        mode = "separate_async"
    if not mode:
        return plan.require_chosen()
    wanted = [c for c in plan.candidates if c.mode == mode]
    if request.split is not None and mode.startswith("separate"):
        wanted = [c for c in wanted if c.split == request.split]
    # A split that was asked for may cut a node in two; what does not fit in memory has no step to simulate.
    fitting = [c for c in wanted if c.fits or (c.split == request.split and c.account.fits)]
    if fitting:
        return fitting[0]
    reason = wanted[0].why_not[0] if wanted else f"{request.cluster.num_gpus} GPU has nothing to separate"
    raise PlanError(
        f"{mode} does not fit: {reason}", "; or ".join(plan.smallest_changes) or "use another mode"
    )


def _json(result: SimResult, candidate: Candidate) -> dict[str, Any]:
    from rollbook.planner.show_simulation import why_apart

    span = result.step_range(candidate.account.step_s)
    return {
        "topology": candidate.as_json(),
        "step_s": result.step_s,
        "step_s_range": [span.low, span.high],
        "closed_form_step_s": candidate.step_s,
        "why_apart": why_apart(result, candidate),
        "idle_frac": {"rollout": result.rollout_idle_frac, "train": result.train_idle_frac},
        "occupancy_frac": result.occupancy_frac,
        "bubble_s": result.bubble_s,
        "tail_s": result.tail_s if candidate.is_on_policy else None,
        "tokens_per_s": result.tokens_per_s,
        "staleness": {str(age): number for age, number in result.staleness.items()},
        "num_trained": result.num_trained,
        "num_failed": result.num_failed,
        "num_evicted": result.num_evicted,
        "num_preemptions": result.num_preemptions,
        "num_running": result.num_running,
        "lost_tokens": result.lost_tokens,
        "trained_mean_tokens": result.trained_mean_tokens,
        "steps": [asdict(step) for step in result.steps],
        "trainer": [
            {"name": i.name, "start_s": i.start_s, "end_s": i.end_s}
            for i in result.intervals
            if i.lane == "trainer"
        ],
    }
