"""A question as a person types it: texts such as `32k`, names, and files, made into a `PlanRequest`.

The options of `rollbook plan` and `rollbook simulate`, and the keys of a workload file, are these fields.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import UnionType

from rollbook.errors import ConfigError, PlanError, RunError, nearest_name
from rollbook.ledger.assumptions import Assumptions, load_assumptions
from rollbook.ledger.hardware import Accelerator, Cluster, accelerator_names, load_accelerator
from rollbook.ledger.model import ModelSpec, load_model
from rollbook.ledger.quantity import parse_count, require_number
from rollbook.ledger.sync import CHANGED_FRAC
from rollbook.ledger.workload import AgentWork, RewardKind, Workload
from rollbook.planner.request import HOST_BYTES_PER_GPU, PlanRequest, SleepLevel, choice_of, split_of

Count = str | int
"""A whole number, or its text with a unit: "32k"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Values that a number of the question may take, and what to do about any other."""

    least: float
    most: float
    remedy: str

    def check(self, option: str, value: object) -> None:
        """Raises PlanError for what is no number, not finite, or out of bounds."""
        require_number(option, value, least=self.least, most=self.most, remedy=self.remedy)


_MOST_S = 30 * 86_400.0
_MOST_PER_STEP = 10_000_000
_MOST_TOKENS = 100_000_000
_MOST_GPUS = 131_072

BOUNDS: dict[str, Bounds] = {
    "gpus_per_node": Bounds(
        least=0, most=1024, remedy="give 1 or more, or 0 for the accelerator's usual node"
    ),
    "length_sigma": Bounds(
        least=0, most=3, remedy="give 0 (all equal) to 3; 0.6 is usual, 1.0 has a long tail"
    ),
    "mini_batches": Bounds(
        least=1, most=_MOST_PER_STEP, remedy="give at least 1, one optimizer update of the step"
    ),
    "epochs": Bounds(least=1, most=1000, remedy="give at least 1 pass over a step's trajectories"),
    "turns": Bounds(least=1, most=10_000, remedy="give at least 1: a trajectory has one response or more"),
    "env_seconds": Bounds(least=0, most=_MOST_S, remedy="give 0 (no environment) or more, in seconds"),
    "env_p50_seconds": Bounds(least=0, most=_MOST_S, remedy="give 0 (from the mean) or more, in seconds"),
    "sandbox_start_seconds": Bounds(least=0, most=_MOST_S, remedy="give 0 or more, in seconds"),
    "cores_per_sandbox": Bounds(least=0.01, most=1024, remedy="give a number of cores, such as 1 or 0.5"),
    "gb_per_sandbox": Bounds(least=0.01, most=10_000, remedy="give gigabytes of memory, such as 4 or 0.5"),
    "changed_frac": Bounds(least=0, most=1, remedy="give a share of the weights between 0 and 1"),
    "lend": Bounds(least=0, most=1e6, remedy="give the seconds of a switch, or 0 to lend nothing"),
    "length_growth": Bounds(
        least=-0.5, most=0.5, remedy="give a growth a step between -0.5 and 0.5, such as 0.01"
    ),
    "horizon": Bounds(least=1, most=100_000, remedy="give the steps of the run, at least 1"),
    "env_p99_seconds": Bounds(least=0, most=_MOST_S, remedy="give 0 (as the mean) or more, in seconds"),
    "rollout_tp": Bounds(least=0, most=1024, remedy="give at least 1, or 0 to leave it to the planner"),
    "host_gb_per_gpu": Bounds(least=0, most=100_000, remedy="give 0 (no room) or more, in GB"),
    "lora_rank": Bounds(least=0, most=65_536, remedy="give 0 (all weights train), or a rank such as 16"),
    "checkpoint_every": Bounds(
        least=0, most=1_000_000, remedy="give 1 step or more, or 0 for about one an hour"
    ),
    "storage_gb_per_s": Bounds(
        least=0, most=1e6, remedy="give gigabytes a second of the whole job, or 0 for the assumption"
    ),
    "max_staleness": Bounds(least=0, most=1000, remedy="give 0 for on-policy training, or 1 or more"),
}
"""Of the options that are plain numbers, by the field of `PlanOptions`; counts are checked where they are read."""

_MOST_P99_OVER_MEAN = 14.9
"""A log-normal's 99th percentile is at most exp(2.326² / 2) times its mean."""


def option_name(field_name: str) -> str:
    """The option of the command line that sets a field."""
    return "--" + field_name.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The question, not yet checked. The only home of the defaults."""

    model: str
    gpu: str = "H100"
    num_gpus: Count = "8"
    gpus_per_node: int = 0
    prompts: Count = "512"
    group_size: Count = "16"
    prompt_tokens: Count = "1024"
    response_tokens: Count = "4096"
    max_response_tokens: Count = ""
    """Empty: four times the mean, as far as the context allows."""
    length_sigma: float = 0.6
    lengths: Path | None = None
    """File of measured response lengths: their mean and spread, and without a limit their longest."""
    algorithm: str = "grpo"
    reward: str = "rule"
    reward_model: str = ""
    """Empty: of the policy's shape."""
    reward_tokens: Count = "256"
    """Of a generative reward model's verdict."""
    reference: bool = True
    proximal: bool = True
    mini_batches: int = 1
    epochs: int = 1
    turns: float = 1.0
    observation_tokens: Count = "0"
    env_seconds: float = 0.0
    env_p50_seconds: float = 0.0
    env_p99_seconds: float = 0.0
    sandbox_start_seconds: float = 0.0
    cores_per_sandbox: float = 1.0
    gb_per_sandbox: float = 4.0
    engine: str = "vllm"
    rollout_tp: int = 0
    rollout_dtype: str = "bfloat16"
    offload: str = "auto"
    host_gb_per_gpu: float = HOST_BYTES_PER_GPU / 1e9
    recompute: str = "auto"
    keep_prefix: bool = True
    share_prompts: bool = True
    prefill_chunk: Count = "0"
    """Tokens of an engine's step; 0: prompts whole."""
    stack: str = ""
    """Empty: the assumptions', or FSDP2 or Megatron as the layouts need."""
    idle_state: str = "auto"
    sleep_level: Count = "auto"
    rebuild_engine: bool = False
    changed_frac: float = CHANGED_FRAC
    lend: float = 0.0
    length_growth: float = 0.0
    horizon: int = 200
    max_staleness: int = 1
    lora_rank: int = 0
    lora_publish: str = "merged"
    checkpoint_every: int = 0
    checkpoint_async: bool = False
    storage_gb_per_s: float = 0.0
    max_context: Count = "0"
    assume: str = "default"
    split: str = ""

    def request(self) -> PlanRequest:
        """The question itself.

        Raises:
            ConfigError, PlanError: a value that is no number, an unknown name, or what cannot be meant.
        """
        self._check_numbers()
        self._check_that_all_act()
        try:
            return self._request()
        except RunError as error:
            raise of_options(error) from None

    def _request(self) -> PlanRequest:
        model = _model(self.model)
        measured = _read_lengths(self.lengths) if self.lengths else ()
        mean_response = self._count("response_tokens", most=_MOST_TOKENS)
        prompt_tokens = self._count("prompt_tokens", most=_MOST_TOKENS)
        max_context = self._count("max_context", most=_MOST_TOKENS, may_be_zero=True)
        if self.max_response_tokens:
            longest = self._count("max_response_tokens", most=_MOST_TOKENS)
        elif measured:
            longest = math.ceil(max(measured))
        else:
            room = (max_context or model.max_context_tokens or 5 * mean_response) - prompt_tokens
            longest = max(min(4 * mean_response, room), mean_response)
        reward: RewardKind = choice_of("--reward", self.reward, "rule", "model", "generative", "sandbox")
        workload = Workload(
            num_prompts=self._count("prompts", most=_MOST_PER_STEP),
            group_size=self._count("group_size", most=_MOST_PER_STEP),
            prompt_tokens=prompt_tokens,
            response_tokens=min(mean_response, longest) if measured else mean_response,
            max_response_tokens=longest,
            length_sigma=self.length_sigma,
            length_samples=measured,
            algorithm=choice_of("--algorithm", self.algorithm, "grpo", "ppo"),
            reward=reward,
            reward_model=_model(self.reward_model) if self.reward_model else None,
            reward_response_tokens=self._count("reward_tokens", most=_MOST_TOKENS)
            if reward == "generative"
            else 0.0,
            num_epochs=self.epochs,
            shares_prompt=self.share_prompts,
            prefill_chunk_tokens=self._count("prefill_chunk", most=_MOST_TOKENS, may_be_zero=True),
            uses_reference=self.reference,
            uses_proximal=self.proximal,
            num_mini_batches=self.mini_batches,
            lora_rank=self.lora_rank,
            publishes_adapters=self._publishes_adapters(),
            agent=AgentWork(
                num_turns=self.turns,
                observation_tokens=self._count("observation_tokens", most=_MOST_TOKENS, may_be_zero=True),
                env_s=self.env_seconds,
                env_p50_s=self.env_p50_seconds,
                env_p99_s=self.env_p99_seconds,
                sandbox_start_s=self.sandbox_start_seconds,
                cpu_cores_per_sandbox=self.cores_per_sandbox,
                bytes_per_sandbox=self.gb_per_sandbox * 1e9,
                keeps_prefix=self.keep_prefix,
            ),
        )
        return PlanRequest(
            model=model,
            model_path=_model_path(self.model),
            hardware_path=str(Path(self.gpu).resolve()) if self.gpu.endswith(".toml") else "",
            workload=workload,
            cluster=Cluster(
                accelerator=_accelerator(self.gpu, _model_path(self.model)),
                num_gpus=self._count("num_gpus", most=_MOST_GPUS),
                gpus_per_node=self.gpus_per_node,
            ),
            assumptions=self._assumptions(),
            engine=choice_of("--engine", self.engine, "vllm", "sglang", "tensorrt_llm"),
            rollout_tp=self.rollout_tp,
            split=split_of(self.split) if self.split else None,
            rollout_dtype=choice_of("--rollout-dtype", self.rollout_dtype, "bfloat16", "float8", "auto"),
            offload=choice_of("--offload", self.offload, "none", "optimizer", "weights", "auto"),
            host_bytes_per_gpu=self.host_gb_per_gpu * 1e9,
            recompute=choice_of("--recompute", self.recompute, "selective", "full", "auto"),
            max_staleness_steps=self.max_staleness,
            checkpoint_every_steps=self.checkpoint_every,
            checkpoint_is_async=self.checkpoint_async,
            storage_bytes_per_s=self.storage_gb_per_s * 1e9,
            max_context_tokens=max_context,
            idle_state=choice_of("--idle-state", self.idle_state, "auto", "device", "host"),
            sleep_level=self._sleep_level(),
            rebuilds_engine=self.rebuild_engine,
            changed_frac=self.changed_frac,
            lend_switch_s=self.lend,
            length_growth_frac=self.length_growth,
            horizon_steps=self.horizon,
        )

    def _check_numbers(self) -> None:
        for field_name, bounds in BOUNDS.items():
            bounds.check(option_name(field_name), getattr(self, field_name))
        mean_s, p99_s = self.env_seconds, self.env_p99_seconds
        for name in ("env_p50_seconds", "env_p99_seconds"):
            if getattr(self, name) and not mean_s:
                raise PlanError(
                    f"{option_name(name)} is {getattr(self, name):g} without --env-seconds",
                    "give the mean seconds of a call too",
                )
        if self.env_p50_seconds > mean_s:
            raise PlanError(
                f"--env-p50-seconds is {self.env_p50_seconds:g} where --env-seconds is {mean_s:g}",
                f"give 0 (from the mean), or at most {mean_s:g}: the seconds are taken as log-normal, whose median is "
                "below its mean",
            )
        if p99_s and not mean_s <= p99_s <= _MOST_P99_OVER_MEAN * mean_s:
            raise PlanError(
                f"--env-p99-seconds is {p99_s:g} where --env-seconds is {mean_s:g}",
                f"give 0 (as the mean), or between {mean_s:g} and {_MOST_P99_OVER_MEAN * mean_s:.4g}: the seconds "
                "are taken as log-normal",
            )

    def _check_that_all_act(self) -> None:
        """Raises PlanError for an option that the others leave without effect: its number would be ignored."""
        for name, other in (("response_tokens", "lengths"), ("length_sigma", "lengths")):
            if self.lengths and not self._is_default(name):
                raise PlanError(
                    f"{option_name(name)} is {getattr(self, name)} beside --{other}, which measured it",
                    f"leave out {option_name(name)}, or --{other}",
                )
        self._check_reward()
        has_environment = self.env_seconds > 0 or str(self.observation_tokens).strip() != "0"
        if self.turns > 1 and not has_environment and self.keep_prefix:
            raise PlanError(
                f"--turns is {self.turns:g} and the environment takes no time, adds no tokens and keeps the prefix",
                "give --env-seconds or --observation-tokens, or leave out --turns",
            )
        for name in ("observation_tokens", "env_seconds", "keep_prefix"):
            if self.turns == 1 and not self._is_default(name):
                what = (
                    "--lose-prefix"
                    if name == "keep_prefix"
                    else f"{option_name(name)} is {getattr(self, name)}"
                )
                raise PlanError(
                    f"{what} with one turn a trajectory: environments answer between turns",
                    "give --turns of 2 or more",
                )

    def _check_reward(self) -> None:
        for name, rewards in (("reward_model", ("model", "generative")), ("reward_tokens", ("generative",))):
            if self.reward not in rewards and not self._is_default(name):
                raise PlanError(
                    f"{option_name(name)} is {getattr(self, name)} with a reward by {self.reward}",
                    f"give --reward {' or '.join(rewards)}, or leave it out",
                )
        has_sandbox = self.reward == "sandbox" or self.env_seconds > 0
        for name in ("cores_per_sandbox", "gb_per_sandbox", "sandbox_start_seconds"):
            if not has_sandbox and not self._is_default(name):
                raise PlanError(
                    f"{option_name(name)} is {getattr(self, name):g} and nothing runs in a sandbox",
                    "give --reward sandbox, or --turns and --env-seconds",
                )

    def _assumptions(self) -> Assumptions:
        if not self.assume:
            raise PlanError("--assume is empty", "leave it out for the default, or name assumptions")
        assumptions = load_assumptions(self.assume)
        if not self.stack:
            return assumptions
        if self.stack not in assumptions.stacks:
            raise PlanError(f"--stack is {self.stack!r}", nearest_name(self.stack, assumptions.stacks))
        return replace(assumptions, stack=self.stack, sources={**assumptions.sources, "stack": "--stack"})

    def _is_default(self, field_name: str) -> bool:
        default = next(f.default for f in fields(self) if f.name == field_name)
        return str(getattr(self, field_name)).strip() == str(default)

    def _sleep_level(self) -> SleepLevel | None:
        levels: dict[str, SleepLevel | None] = {"auto": None, "0": 0, "1": 1, "2": 2}
        asked = str(self.sleep_level).strip()
        if asked not in levels:
            raise PlanError(
                f"--sleep-level is {asked}",
                "use 0 (engines stay awake), 1 (their weights wait in host memory), 2 (the publication brings them "
                "back), or auto",
            )
        if self.rebuild_engine and asked == "0":
            raise PlanError(
                "--rebuild-engine with --sleep-level 0: an engine that stays awake is not built again",
                "leave one of them out",
            )
        return levels[asked]

    def _publishes_adapters(self) -> bool:
        alone = choice_of("--lora-publish", self.lora_publish, "merged", "adapter") == "adapter"
        if alone and not self.lora_rank:
            raise PlanError("--lora-publish is adapter without --lora-rank", "give --lora-rank, such as 16")
        return alone

    def _count(self, field_name: str, *, most: int, may_be_zero: bool = False) -> int:
        value, option = getattr(self, field_name), option_name(field_name)
        if may_be_zero and str(value).strip() == "0":
            return 0
        number = parse_count(value, what=option)
        require_number(option, number, least=1, most=most, remedy=f"give {option} of at most {most:,}")
        return number


def _model_path(named: str) -> str:
    """What a written config should load: the folder of a config.json wherever it is run from, or the name."""
    path = Path(named)
    if path.suffix == ".json":
        path = path.parent
    return str(path.resolve()) if path.is_dir() else named


def read_options(path: Path) -> dict[str, str | int | float | bool | Path]:
    """A workload's description in TOML: fields of `PlanOptions` as keys, and `mode`.

    Raises:
        ConfigError: unreadable, an unknown key, a value of another kind, or no model.
    """
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "give a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", 'write lines such as model = "Qwen3-8B"') from None
    known = {f.name: str(f.type) for f in fields(PlanOptions)} | {"mode": "str"}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key}", nearest_name(key, known))
        kind, wanted = _KINDS[known[key]]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{path}: {key} is {value!r}", f"give {wanted}")
    if "model" not in values:
        raise ConfigError(f"{path} names no model", 'add model = "..."')
    if "lengths" in values:
        values["lengths"] = Path(str(values["lengths"]))
    return values


_LONGEST_HINT = 120
_NUM_NEAR = 3


def _model(name: str) -> ModelSpec:
    """Raises ConfigError that says how to see every name."""
    try:
        return load_model(name)
    except ConfigError as error:
        if "name in the registry" not in error.what:
            raise
        raise ConfigError(
            error.what, f"{error.remedy}; `rollbook plan --model list` prints all names"
        ) from None


def _accelerator(name: str, model_path: str) -> Accelerator:
    """Raises ConfigError that says how to see every name."""
    try:
        return load_accelerator(name, model_path)
    except ConfigError as error:
        what, remedy = error.args
        if "is not in the table" not in what:
            raise
        if len(remedy) > _LONGEST_HINT:  # nothing is near: not the whole table
            known = accelerator_names()
            near = difflib.get_close_matches(name, known, n=_NUM_NEAR, cutoff=0.0)
            remedy = f"the nearest of {len(known)} names: {', '.join(near)}"
        raise ConfigError(
            what,
            f"{remedy} (`rollbook plan --gpu list` prints all; a hardware.toml of calibrate is read, too)",
        ) from None


_FIELDS_OF_OPTIONS = {
    "num_prompts": "prompts",
    "num_mini_batches": "mini_batches",
    "num_epochs": "epochs",
    "num_turns": "turns",
    "env_s": "env_seconds",
    "env_p50_s": "env_p50_seconds",
    "env_p99_s": "env_p99_seconds",
    "sandbox_start_s": "sandbox_start_seconds",
    "prefill_chunk_tokens": "prefill_chunk",
    "reward_response_tokens": "reward_tokens",
    "max_context_tokens": "max_context",
    "max_staleness_steps": "max_staleness",
}
"""Of what the books check, by names that are not the option's own."""


def of_options(error: RunError) -> RunError:
    """`error` of a field that the books check as one of the option that set it.

    >>> of_options(PlanError("num_turns is 0, below 1", "raise max_response_tokens")).args
    ('--turns is 0, below 1', 'raise --max-response-tokens')
    """
    options = {f.name: option_name(f.name) for f in fields(PlanOptions) if "_" in f.name}
    options |= {name: option_name(own) for name, own in _FIELDS_OF_OPTIONS.items()}

    def named(text: str) -> str:
        text = re.sub(r"(?<![-\w./])algorithm (?=grpo|ppo)", "--algorithm ", text)
        return re.sub(
            r"(?<![-\w./])[a-z][a-z0-9]*(_[a-z0-9]+)+(?![\w./])",
            lambda found: options.get(found[0], found[0]),
            text,
        )

    return type(error)(named(error.what), named(error.remedy))


_SWITCHED_OFF = {
    "--lose-prefix": "keep_prefix = false",
    "--no-share-prompts": "share_prompts = false",
    "--no-reference": "reference = false",
    "--no-proximal": "proximal = false",
}


def of_file(path: Path, error: RunError) -> RunError:
    """`error` of an option as one of the file that gave it: keys for the names of options.

    >>> of_file(Path("w.toml"), PlanError("--num-gpus is 0, below 1", "give --num-gpus of at least 1")).args
    ('w.toml: num_gpus is 0, below 1', 'give num_gpus of at least 1')
    """
    keys = {option_name(f.name): f.name for f in fields(PlanOptions)} | _SWITCHED_OFF

    def named(text: str) -> str:
        return re.sub(r"--[a-z][a-z0-9-]*", lambda found: keys.get(found[0], found[0]), text)

    return type(error)(f"{path}: {named(error.what)}", named(error.remedy))


_KINDS: dict[str, tuple[type | UnionType, str]] = {
    "str": (str, "a name in quotes"),
    "Path | None": (str, "a path in quotes"),
    "Count": (int | float | str, 'a count such as 4096 or "8k"'),
    "int": (int, "a whole number"),
    "float": (int | float, "a number"),
    "bool": (bool, "true or false"),
}
"""Of a TOML value, by the annotation of the field that takes it."""


def _read_lengths(path: Path) -> tuple[float, ...]:
    remedy = "write one response length in tokens on each line"
    try:
        lengths = tuple(float(word) for word in path.read_text().split())
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", "give a file with one length a line"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}", remedy) from None
    if not lengths:
        raise ConfigError(f"{path} holds no length", remedy)
    for length in lengths:
        require_number(f"a length in {path}", length, least=1, most=_MOST_TOKENS, remedy=remedy)
    return lengths
