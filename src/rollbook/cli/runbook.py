"""`rollbook runbook`: the duty manual of a job, with its own thresholds, and its derivation record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rollbook.config.run_config import RunConfig
    from rollbook.diagnose.runbook import Job
    from rollbook.observe.alerts import Thresholds


def command(
    config: Annotated[Path, typer.Argument(help="Run config (TOML), or a run directory.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Override one field; may be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write here instead of printing.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write it as a page.")] = None,
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu",
            help="Before the run: its accelerator, or a hardware.toml; empty: plan.hardware, else this machine.",
        ),
    ] = "",
    num_gpus: Annotated[
        int, typer.Option("--num-gpus", min=0, help="Devices of the whole job; 0: as the config says.")
    ] = 0,
) -> None:
    """Print the duty manual of a job: the four signals, their thresholds, the decision tree, the actions.

    Example: rollbook runbook examples/addition.toml
    """
    from rollbook.config.loading import load_config
    from rollbook.config.paths import with_whole_paths
    from rollbook.config.run_config import RunConfig
    from rollbook.diagnose.runbook import to_html, to_markdown
    from rollbook.errors import ConfigError, RunError
    from rollbook.observe.run_dir import storage_error

    path = config / "config.toml" if config.is_dir() else config
    loaded = with_whole_paths(load_config(path, set_ or [], RunConfig), path.parent)
    loaded.check()
    job = _job(loaded, path)
    plan = _plan(config if config.is_dir() else Path(job.run_dir))
    if plan is not None and (gpu or num_gpus):
        given = "--gpu" if gpu else "--num-gpus"
        if config.is_dir():
            raise ConfigError(
                f"{given} is given for {config}, which has begun: its plan.json is the record",
                f"leave {given} out, or give the config instead of the run directory",
            )
        typer.echo(
            f"derived as {given} says; {job.run_dir} has begun on another record: its plan.json", err=True
        )
        plan = None
    derivation, why_not = None, ""
    if plan is None:
        from rollbook.controller.foresight import derive

        try:
            derivation = derive(loaded, gpu=gpu, num_gpus=num_gpus)
        except RunError as error:
            if gpu or num_gpus:
                raise
            why_not = f"{error.what}: {error.remedy}"
    text = to_markdown(job, _thresholds(loaded), plan=plan, derivation=derivation, why_not=why_not)
    for target, content in ((out, text), (html, to_html(text) if html is not None else "")):
        if target is None:
            continue
        try:
            target.write_text(content, encoding="utf-8")
        except OSError as error:
            raise storage_error(target, error) from error
    if out is None:
        typer.echo(text, nl=False)


def _job(config: RunConfig, path: Path) -> Job:
    from rollbook.diagnose.runbook import Job

    model = config.model.path or "a new model"
    return Job(
        name=config.run.name,
        run_dir=str(path.parent if path.name == "config.toml" else Path(config.run.dir) / config.run.name),
        config=str(path),
        model=f"{model}, {config.model.dtype} on {config.model.device}",
        schedule=config.run.schedule,
        num_steps=config.run.num_steps,
        groups_per_step=config.run.groups_per_step,
        group_size=config.rollout.group_size,
        max_response_tokens=config.rollout.max_response_tokens,
        sources=tuple(source.label for source in config.data.sources),
        algorithm=config.algorithm.name,
        engine=config.rollout.engine,
        num_replicas=config.rollout.num_replicas,
        num_slots=config.rollout.num_slots,
        max_staleness_steps=config.buffer.max_staleness_steps,
        sync_every_steps=config.sync.every_steps,
        transport=config.sync.transport,
        bucket_bytes=config.sync.bucket_bytes,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        max_refills_per_step=config.buffer.max_refills(config.run.groups_per_step),
        group_deadline_s=config.buffer.group_deadline_s,
        step_deadline_s=config.buffer.step_deadline_s,
        max_failure_frac=config.run.max_failure_frac,
        has_environment=config.run.max_turns > 1,
        has_filter=config.algorithm.filter.drop_flat,
        checkpoint_every_steps=config.checkpoint.every_steps,
        memory=_memory(config),
    )


def _memory(config: RunConfig) -> tuple[tuple[str, str], ...]:
    """Bytes by arithmetic, with their formulas; nothing for a model whose shape is not at hand."""
    from rollbook.diagnose.wording import num
    from rollbook.errors import RunError
    from rollbook.ledger.model import load_model

    if config.model.path is None:
        return ()
    try:
        model = load_model(config.model.path)
    except RunError:
        return ()
    width = 2 if config.model.dtype == "bfloat16" else 4
    kv_bytes, pool = model.kv_bytes_per_token(width), config.rollout.kv_pool_tokens
    return (
        (
            "weights",
            f"{num(model.params / 1e9)} B parameters x {width} B = {num(model.params * width / 1e9)} GB a replica",
        ),
        (
            "training state",
            f"x 16 B (bf16, fp32 master, two moments, gradients) = {num(model.params * 16 / 1e9)} GB",
        ),
        ("KV pool", f"{pool:,} tokens x {num(kv_bytes)} B = {num(pool * kv_bytes / 1e9)} GB a replica"),
    )


def _thresholds(config: RunConfig) -> Thresholds:
    from rollbook.observe.alerts import Thresholds

    usual = Thresholds()
    return Thresholds(
        max_staleness_steps=config.buffer.max_staleness_steps,
        max_logprob_gap_nats=usual.max_logprob_gap_nats if config.model.dtype == "bfloat16" else 0.001,
        max_failed_frac=min(usual.max_failed_frac, config.run.max_failure_frac),
    )


def _plan(run_dir: Path) -> dict[str, Any] | None:
    """The expectation in the run directory, None before the run has begun."""
    try:
        value = json.loads((run_dir / "plan.json").read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
