"""Options that some runs never read, and what a run says of one that was set all the same.

An option that asks for something which the run never does (a correction whose weights are all 1, a lent engine on a
shared device, more staleness than the schedule has) is refused by `RunConfig.check` or its section. An option that only
says *how* something is done, which this run does not do, stands in the table below and is said: a config serves several
schedules and engines, and choosing another one stays one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from rollbook.algos.config import AlgorithmConfig
from rollbook.config.run_config import RunConfig
from rollbook.controller.schedule import SCHEDULES


class Unused(NamedTuple):
    """An option that was set and that nothing reads."""

    option: str
    value: Any
    needs: str
    """What would have to be set for it to have an effect."""

    @property
    def says(self) -> str:
        value = f"'{self.value}'" if isinstance(self.value, str) else self.value
        return f"{self.option} is {value}, which takes {self.needs}"


class Needs(NamedTuple):
    """Where an option is read."""

    words: str
    holds: Callable[[RunConfig], bool]


def _swaps_amid_responses(config: RunConfig) -> bool:
    """Whether a publication finds responses under way, with their keys and values."""
    if SCHEDULES[config.run.schedule].pauses_for_training:
        return config.run.schedule == "colocate_async" and config.rollout.pause_mode == "keep"
    return config.buffer.max_staleness_steps > 0


def _admits_more_than(config: RunConfig) -> bool:
    admitted = (config.buffer.max_staleness_steps + 1) * config.run.groups_per_step
    return config.buffer.max_running_groups < admitted


RAY = Needs("cluster.kind = 'ray'", lambda c: c.cluster.kind == "ray")
VLLM = Needs("rollout.engine = 'vllm'", lambda c: c.rollout.engine == "vllm")
VLLM_ON_CUDA = Needs(
    "rollout.engine = 'vllm' on CUDA", lambda c: c.rollout.engine == "vllm" and c.rollout.device != "cpu"
)
NATIVE = Needs("rollout.engine = 'native'", lambda c: c.rollout.engine == "native")
REPLICAS = Needs("rollout.num_replicas above 1", lambda c: c.rollout.num_replicas > 1)
REFILLS = Needs(
    "buffer.refill_failed or algorithm.filter.refill",
    lambda c: c.buffer.refill_failed or c.algorithm.filter.refill,
)
PROBES = Needs(
    "sync.probe = true and rollout.mismatch = 'none'", lambda c: c.sync.probe and c.rollout.mismatch == "none"
)
MINI_BATCHES = Needs("trainer.num_mini_batches above 1", lambda c: c.trainer.num_mini_batches > 1)
GAE = Needs("algorithm.estimator = 'gae'", lambda c: c.algorithm.estimator == "gae")
RATIO = Needs("a loss that clips (not 'reinforce')", lambda c: c.algorithm.loss != "reinforce")
HELD_OUT = Needs("eval.num_prompts above 0", lambda c: c.eval.num_prompts > 0)
WARMUP = Needs("warmup.num_updates above 0", lambda c: c.warmup.num_updates > 0)
WARMUP_CHECKS = Needs(
    "warmup.num_updates and eval.num_prompts above 0",
    lambda c: c.warmup.num_updates > 0 and c.eval.num_prompts > 0,
)
PLANS = Needs("plan.is_on = true", lambda c: c.plan.is_on)
LOADED = Needs("model.path", lambda c: c.model.path is not None)
CRITIC = Needs("algorithm.estimator = 'gae'", lambda c: c.algorithm.needs_values)

ONLY_WITH: Mapping[str, Needs] = {
    "run.max_turns": Needs(
        "an environment that answers a response: those of `data.sources` end after one", lambda c: False
    ),
    "rollout.pause_mode": Needs(
        "run.schedule = 'colocate_async'", lambda c: c.run.schedule == "colocate_async"
    ),
    "rollout.kv_policy": Needs(
        "responses under way while weights change: colocate_async with pause_mode = 'keep', or separate_async with "
        "buffer.max_staleness_steps above 0",
        _swaps_amid_responses,
    ),
    "sync.commit_order": Needs(
        "several replicas that decode meanwhile: separate_async with buffer.max_staleness_steps above 0 and "
        "rollout.num_replicas above 1",
        lambda c: (
            not SCHEDULES[c.run.schedule].pauses_for_training
            and c.buffer.max_staleness_steps > 0
            and c.rollout.num_replicas > 1
        ),
    ),
    "sync.on_replica_failure": REPLICAS,
    "buffer.max_running_groups": Needs(
        "fewer than (buffer.max_staleness_steps + 1) x run.groups_per_step: no more are ever admitted",
        _admits_more_than,
    ),
    "buffer.max_refills_per_step": REFILLS,
    "buffer.on_starvation": REFILLS,
    "sync.shm_dir": Needs(
        "sync.transport = 'shm', or 'inproc' under Ray",
        lambda c: c.sync.transport == "shm" or (c.sync.transport == "inproc" and c.cluster.kind == "ray"),
    ),
    "sync.disk_dir": Needs("sync.transport = 'disk'", lambda c: c.sync.transport == "disk"),
    "sync.probe_prompt_tokens": PROBES,
    "sync.probe_response_tokens": PROBES,
    "sync.probe_factor": PROBES,
    "rollout.page_tokens": NATIVE,
    "rollout.cuda_graphs": Needs(
        "rollout.engine = 'native' on CUDA",
        lambda c: c.rollout.engine == "native" and c.rollout.device != "cpu",
    ),
    "rollout.vllm": VLLM,
    "rollout.vllm.compile": VLLM_ON_CUDA,
    "rollout.vllm.sleep_mode": VLLM_ON_CUDA,
    "rollout.vllm.load_format": Needs(
        "an engine of its own: a run's first publication brings the weights", lambda c: False
    ),
    "cluster.address": RAY,
    "cluster.start_deadline_s": RAY,
    "cluster.call_deadline_s": RAY,
    "cluster.step_deadline_s": RAY,
    "cluster.max_restarts": RAY,
    "memory.move_deadline_s": Needs(
        "engines that stand still for the trainer (run.schedule = 'sync' or 'colocate_async') or lending.is_on = true",
        lambda c: SCHEDULES[c.run.schedule].pauses_for_training or c.lending.is_on,
    ),
    "plan.hardware": PLANS,
    "plan.response_tokens": PLANS,
    "eval.every_steps": HELD_OUT,
    "eval.temperature": HELD_OUT,
    "eval.samples_per_prompt": HELD_OUT,
    "warmup.batch_sequences": WARMUP,
    "warmup.learning_rate": WARMUP,
    "warmup.until_exact_frac": WARMUP_CHECKS,
    "warmup.check_every_updates": WARMUP_CHECKS,
    "trainer.min_lr_frac": Needs(
        "trainer.schedule = 'linear' or 'cosine'", lambda c: c.trainer.schedule != "constant"
    ),
    "trainer.shuffle": MINI_BATCHES,
    "trainer.seed": Needs(
        "trainer.num_mini_batches above 1 and trainer.shuffle = true",
        lambda c: c.trainer.num_mini_batches > 1 and c.trainer.shuffle,
    ),
    "trainer.gather_bytes": Needs(
        "cluster.num_trainer_ranks above 1", lambda c: c.cluster.num_trainer_ranks > 1
    ),
    "critic": CRITIC,
    "critic.min_lr_frac": Needs(
        "critic.schedule = 'linear' or 'cosine'",
        lambda c: c.algorithm.needs_values and c.critic.schedule != "constant",
    ),
    "algorithm.gamma": Needs(
        "algorithm.estimator = 'gae' or 'returns'", lambda c: c.algorithm.estimator in ("gae", "returns")
    ),
    "algorithm.gae_lambda": GAE,
    "algorithm.truncation": GAE,
    "algorithm.value_clip_eps": GAE,
    "algorithm.clip_eps_low": RATIO,
    "algorithm.clip_eps_high": RATIO,
    "algorithm.kl.estimator": Needs(
        "algorithm.kl.placement = 'loss' or 'reward'", lambda c: c.algorithm.kl.placement != "none"
    ),
    "algorithm.distill.estimator": Needs(
        "algorithm.distill.placement = 'loss'", lambda c: c.algorithm.distill.placement == "loss"
    ),
    "algorithm.overlong.penalty": Needs(
        "algorithm.overlong.buffer_frac above 0", lambda c: c.algorithm.overlong.buffer_frac > 0
    ),
    "algorithm.correction.reject.estimator": Needs(
        "algorithm.correction.reject.statistic", lambda c: c.algorithm.correction.reject.statistic != "none"
    ),
    "model.revision": LOADED,
    "model.trust_remote_code": LOADED,
    "observe.project": Needs("observe.trackers", lambda c: bool(c.observe.trackers)),
    "observe.prometheus_host": Needs(
        "observe.prometheus_port", lambda c: c.observe.prometheus_port is not None
    ),
}
"""Option, or table of options -> where it is read. What is not here every run reads."""


class OfItem(NamedTuple):
    """Where an option of one entry of an array of tables is read."""

    words: str
    holds: Callable[[Any], bool]


MADE = OfItem("task or reasoning_gym", lambda s: bool(s.task or s.reasoning_gym))
READ = OfItem("path or hub", lambda s: bool(s.path or s.hub))
OF_A_SOURCE: Mapping[str, OfItem] = {
    "options": MADE,
    "seed": MADE,
    "hub_config": OfItem("hub", lambda s: bool(s.hub)),
    **dict.fromkeys(
        (
            "split",
            "prompt_column",
            "messages_column",
            "answer_column",
            "answer_pattern",
            "id_column",
            "source_column",
            "task_columns",
        ),
        READ,
    ),
}
DRAWN = OfItem("data.sources: held-out prompts are all asked", lambda s: False)
OF_HELD_OUT: Mapping[str, OfItem] = {**OF_A_SOURCE, "weight": DRAWN, "end_weight": DRAWN}
OF_A_TERM: Mapping[str, OfItem] = {
    "full_marks": OfItem("is_tested = true", lambda t: t.is_tested),
}


def unused_options(config: RunConfig) -> list[Unused]:
    """Every option that was set to something else than its default and that this run does not read."""
    found: list[Unused] = []
    for option, needs in ONLY_WITH.items():
        if not needs.holds(config):
            found += [Unused(name, value, needs.words) for name, value in _changed(config, option)]
    sources, held_out = config.data.sources, config.data.held_out
    for title, items, table in (
        ("data.sources", sources, OF_A_SOURCE),
        ("data.held_out", held_out, OF_HELD_OUT),
        ("reward.terms", config.reward.terms, OF_A_TERM),
    ):
        for idx, item in enumerate(items):
            found += _unused_of(f"{title}.{idx}", item, table)
    first = {unused.option: unused for unused in reversed(found)}  # of a table's reason and an option's own
    return sorted(first.values())


def _unused_of(title: str, item: BaseModel, table: Mapping[str, OfItem]) -> Iterator[Unused]:
    for name, needs in table.items():
        default = type(item).model_fields[name].get_default(call_default_factory=True)
        if (value := getattr(item, name)) != default and not needs.holds(item):
            yield Unused(f"{title}.{name}", value, needs.words)


def _changed(config: RunConfig, option: str) -> Iterator[tuple[str, Any]]:
    """The option, or each of a table's, that has not its default value (under `algorithm` its preset's)."""
    *tables, name = option.split(".")
    held = _at(config, tables)
    if tables[:1] == ["algorithm"]:
        default = getattr(_at(AlgorithmConfig(name=config.algorithm.name), tables[1:]), name)
    else:
        default = type(held).model_fields[name].get_default(call_default_factory=True)
    yield from _differing(option, getattr(held, name), default)


def _at(section: BaseModel, tables: Sequence[str]) -> BaseModel:
    for table in tables:
        section = getattr(section, table)
    return section


def _differing(option: str, value: Any, default: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, BaseModel) and isinstance(default, BaseModel):
        for name in type(value).model_fields:
            yield from _differing(f"{option}.{name}", getattr(value, name), getattr(default, name))
    elif value != default:
        yield option, value
