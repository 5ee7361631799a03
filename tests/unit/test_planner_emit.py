"""Exports of a plan: accepted by what reads them, and true to the plan."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollbook.config.loading import validate
from rollbook.config.run_config import RunConfig
from rollbook.errors import PlanError
from rollbook.ledger.assumptions import load_assumptions
from rollbook.ledger.hardware import Cluster, load_accelerator
from rollbook.ledger.model import load_model
from rollbook.ledger.workload import AgentWork, Workload
from rollbook.planner.emit import EMITTERS, emitter
from rollbook.planner.emit_verl import verl_overrides
from rollbook.planner.execution import execution
from rollbook.planner.options import PlanOptions
from rollbook.planner.plan import Plan, make_plan
from rollbook.planner.request import PlanRequest
from rollbook.planner.run_toml import run_toml
from rollbook.planner.words import seconds, seconds_range
from rollbook.planner.yaml_text import to_yaml

CASES: dict[str, dict[str, Any]] = {
    "separate": {"model": "Qwen3-32B", "num_gpus": 128, "response_tokens": 8192},
    "colocate": {"model": "Llama-3-8B", "num_gpus": 64, "response_tokens": 8192},
    "on_policy": {"model": "Qwen3-8B", "num_gpus": 8, "max_staleness_steps": 0},
    "experts": {"model": "DeepSeek-V3", "num_gpus": 512, "response_tokens": 8192},
    "critic": {"model": "Qwen3-8B", "num_gpus": 64, "algorithm": "ppo", "num_mini_batches": 4},
    "bypass": {"model": "Qwen3-8B", "num_gpus": 32, "uses_proximal": False, "uses_reference": False},
    "sandbox": {"model": "Qwen3-8B", "num_gpus": 32, "reward": "sandbox", "num_turns": 6, "env_s": 4.0},
}
_PLANS: dict[str, Plan] = {}


def plan(name: str) -> Plan:
    if name not in _PLANS:
        values = dict(CASES[name])
        agent = AgentWork(
            num_turns=values.pop("num_turns", 1.0),
            env_s=values.pop("env_s", 0.0),
            observation_tokens=200.0 if "reward" in values else 0.0,
        )
        model, num_gpus = load_model(values.pop("model")), values.pop("num_gpus")
        bound = values.pop("max_staleness_steps", 1)
        response = values.pop("response_tokens", 4096)
        workload = Workload(
            num_prompts=512, group_size=16, prompt_tokens=1024, response_tokens=response,
            max_response_tokens=4 * response, agent=agent, **values,
        )  # fmt: skip
        cluster = Cluster(accelerator=load_accelerator("H100"), num_gpus=num_gpus)
        request = PlanRequest(
            model=model, workload=workload, cluster=cluster, assumptions=load_assumptions("default"),
            max_staleness_steps=bound,
        )  # fmt: skip
        _PLANS[name] = make_plan(request, is_brief=True)
    return _PLANS[name]


every_case = pytest.mark.parametrize("name", CASES)


@every_case
def test_the_run_toml_is_a_run_config_that_passes_its_own_checks(name: str) -> None:
    config = validate(tomllib.loads(run_toml(plan(name))), RunConfig, origin="the plan")
    config.check()
    chosen = plan(name).require_chosen()
    assert config.run.groups_per_step == 512 and config.rollout.group_size == 16
    assert config.rollout.num_replicas == execution(plan(name).request, chosen).num_replicas
    assert config.buffer.max_staleness_steps == (0 if chosen.is_on_policy else 1)
    assert (config.algorithm.name == "ppo") == (CASES[name].get("algorithm") == "ppo")


def test_every_choice_in_the_run_toml_carries_its_reason() -> None:
    text = run_toml(plan("separate"))
    for key in ("schedule", "num_slots", "kv_pool_tokens", "micro_batch_tokens", "transport", "order"):
        before = text[: text.index(f"\n{key} = ")].splitlines()[-1]
        assert before.startswith("# "), key
    for reasoned in plan("separate").derivation:
        assert f"# {reasoned.step}. {reasoned.title}" in text


@every_case
def test_verl_composes_its_own_config_from_the_overrides(name: str) -> None:
    """`ppo_trainer` of the installed verl 0.9.1, composed by Hydra with what `--emit verl` prints."""
    spec = importlib.util.find_spec("verl")
    hydra = pytest.importorskip("hydra", reason="hydra-core is not installed")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("verl is not installed (pip install --no-deps verl==0.9.1 hydra-core)")
    from omegaconf import OmegaConf

    folder = str(Path(spec.submodule_search_locations[0]) / "trainer" / "config")
    overrides = verl_overrides(plan(name))
    with hydra.initialize_config_dir(config_dir=folder, version_base=None):
        config = hydra.compose(config_name="ppo_trainer", overrides=[o.text() for o in overrides])
    for override in overrides:
        if override.key != "model_engine":
            assert OmegaConf.select(config, override.key.removeprefix("+")) == override.value, override.key
    OmegaConf.to_container(config, resolve=True)


@every_case
def test_verl_batch_sizes_satisfy_what_verl_asserts(name: str) -> None:
    """separate_async: train_batch_size = parameter_sync_step x ppo_mini_batch_size, and a real backend."""
    values = {o.key: o.value for o in verl_overrides(plan(name))}
    chosen = plan(name).require_chosen()
    train_gpus = values["trainer.nnodes"] * values["trainer.n_gpus_per_node"]  # type: ignore[operator]
    assert train_gpus == chosen.account.train.num_gpus
    if values["trainer.v1.trainer_mode"] == "separate_async":
        every = values["trainer.v1.separate_async.parameter_sync_step"]
        assert (
            values["data.train_batch_size"] == every * values["actor_rollout_ref.actor.ppo_mini_batch_size"]
        )  # type: ignore[operator]
        assert values["actor_rollout_ref.rollout.checkpoint_engine.backend"] != "naive"
        rollout = "actor_rollout_ref.rollout"
        assert values[f"{rollout}.nnodes"] * values[f"{rollout}.n_gpus_per_node"] == chosen.split[0]  # type: ignore[operator]


@every_case
def test_slime_arguments_give_every_gpu_a_role(name: str) -> None:
    text = EMITTERS["slime"](plan(name))
    chosen = plan(name).require_chosen()

    def number(flag: str) -> int:
        found = re.search(rf"{flag} (\d+)\n", text)
        assert found is not None, flag
        return int(found[1])

    assert number("--actor-num-nodes") * number("--actor-num-gpus-per-node") == chosen.split[1]
    if chosen.mode.startswith("separate"):
        assert number("--rollout-num-gpus") == chosen.split[0] and "--colocate" not in text
    else:
        assert "--colocate\n" in text
    assert number("--rollout-batch-size") == 512 and number("--n-samples-per-prompt") == 16


@every_case
def test_areal_backends_multiply_to_the_planned_gpus(name: str) -> None:
    data = yaml.safe_load(EMITTERS["areal"](plan(name)))
    chosen = plan(name).require_chosen()

    def product(spec: str) -> int:
        total = 1
        for degree in re.findall(r"[dptce](\d+)", spec):
            total *= int(degree)
        return total

    rollout = data["rollout"]["backend"].removeprefix("sglang:")
    assert product(rollout) == chosen.account.rollout.num_replicas * chosen.rollout_layout.num_gpus
    backend = data["actor"]["backend"]
    parts = re.findall(r"(?:attn|ffn):([^|)]+)", backend) or [backend.split(":")[1]]
    assert {product(part) for part in parts} == {chosen.split[1]}
    assert data["rollout"]["max_head_offpolicyness"] == (0 if chosen.is_on_policy else 1)


@every_case
def test_ray_bundles_add_up_to_the_planned_gpus(name: str) -> None:
    tree = ast.parse(EMITTERS["ray"](plan(name)))
    code = [node for node in tree.body if isinstance(node, ast.Assign)]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(code, []), "pools", "exec"), names)
    chosen = plan(name).require_chosen()
    gpus = {
        pool: sum(bundle.get("GPU", 0) for bundle in group["bundles"])
        for pool, group in names["POOLS"].items()
    }
    if chosen.mode.startswith("separate"):
        assert (gpus["rollout"], gpus["train"]) == chosen.split
    else:
        assert gpus["gpu"] == chosen.split[0]
    assert ("sandbox" in gpus) == (name == "sandbox")
    assert len(names["REPLICAS"]) == chosen.account.rollout.num_replicas


RAY_JOB = {
    "apiVersion": "ray.io/v1",
    "kind": "RayJob",
    "metadata": {"name": str, "labels": dict},
    "spec": {
        "entrypoint": str,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "submissionMode": str,
        "rayClusterSpec": {
            "headGroupSpec": {"rayStartParams": dict, "template": dict},
            "workerGroupSpecs": [
                {
                    "groupName": str,
                    "replicas": int,
                    "minReplicas": int,
                    "maxReplicas": int,
                    "rayStartParams": dict,
                    "template": dict,
                }
            ],
        },
    },
}
POD = {
    "metadata": {"labels": dict},
    "spec": {
        "containers": [
            {
                "name": str,
                "image": str,
                "resources": {"requests": dict, "limits": dict},
                "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool}],
            }
        ],
        "volumes": [{"name": str, "configMap": dict, "emptyDir": dict}],
        "tolerations": [{"key": str, "operator": str, "effect": str}],
    },
}


def matches(value: object, schema: object, path: str = "") -> None:
    """`value` has only keys of `schema`, each of the type or constant it names."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), path
        for key, inner in value.items():
            assert key in schema, f"{path}.{key}"
            matches(inner, schema[key], f"{path}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list) and value, path
        for item in value:
            matches(item, schema[0], f"{path}[]")
    elif isinstance(schema, type):
        assert type(value) is schema, f"{path} is {value!r}"
    else:
        assert value == schema, path


@every_case
def test_kubernetes_manifests_match_their_schemas_and_start_as_one_gang(name: str) -> None:
    config, gang, job = yaml.safe_load_all(EMITTERS["kubernetes"](plan(name)))
    matches(job, RAY_JOB)
    cluster = job["spec"]["rayClusterSpec"]
    templates = [
        cluster["headGroupSpec"]["template"],
        *(g["template"] for g in cluster["workerGroupSpecs"]),
    ]
    for template in templates:
        matches(template, POD)
        resources = template["spec"]["containers"][0]["resources"]
        assert resources["requests"] == resources["limits"]  # guaranteed, so nothing is evicted half-way
        for quantity in resources["limits"].values():
            assert re.fullmatch(r"\d+(Gi)?", quantity)
        assert template["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == gang["metadata"]["name"]
    sizes = [(g["replicas"], g["minReplicas"], g["maxReplicas"]) for g in cluster["workerGroupSpecs"]]
    assert all(len(set(size)) == 1 for size in sizes)
    assert gang["spec"]["minMember"] == 1 + sum(size[0] for size in sizes)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    validate(tomllib.loads(config["data"]["run.toml"]), RunConfig, origin="the manifest")
    validator = importlib.util.find_spec("kubernetes_validate")
    if validator is not None:
        import kubernetes_validate

        for template in templates:
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": "x"}}
            kubernetes_validate.validate({**pod, "spec": template["spec"]}, "1.31", strict=True)


def planned(**values: Any) -> Plan:
    """A plan of the command line's options for Qwen3-8B on 32 GPUs."""
    return make_plan(PlanOptions(model="Qwen3-8B", num_gpus="32", **values).request(), is_brief=True)


@pytest.mark.parametrize(
    ("options", "clause", "systems"),
    [
        ({"algorithm": "ppo"}, "a critic", {"areal"}),
        ({"reward": "generative"}, "a reward by generative", {"verl", "slime", "areal"}),
        ({"turns": 4.0, "env_seconds": 5.0}, "4 turns with an environment", {"verl", "slime", "areal"}),
        ({"epochs": 2}, "2 passes of training over a step", {"slime", "areal"}),
        ({"rollout_dtype": "float8"}, "engine weights in float8", {"slime", "areal"}),
        ({"offload": "optimizer"}, "master weights and moments in host memory", {"areal"}),
        ({"checkpoint_async": True}, "checkpoints written beside training", {"verl", "slime", "areal"}),
    ],
)
def test_what_an_exporter_leaves_out_of_the_plan_heads_its_output(
    options: dict[str, Any], clause: str, systems: set[str]
) -> None:
    of = planned(**options)
    heads = {name: EMITTERS[name](of) for name in ("verl", "slime", "areal")}
    assert {name for name, text in heads.items() if f"# - {clause}" in text} == systems


def test_a_plan_without_extras_is_exported_whole() -> None:
    for name in ("verl", "slime", "areal"):
        assert "not set here" not in EMITTERS[name](planned())


def test_exporters_take_checkpoints_chunks_and_engine_memory_from_the_plan() -> None:
    of = planned(checkpoint_every=7, prefill_chunk="2048", max_staleness=0)
    side = of.require_chosen().account.rollout
    assert of.require_chosen().mode == "sync"  # engine and trainer share each GPU
    verl = {o.key: o.value for o in verl_overrides(of)}
    rollout = "actor_rollout_ref.rollout"
    assert verl["trainer.save_freq"] == 7
    assert verl[f"{rollout}.max_num_batched_tokens"] == 2048  # vLLM counts running sequences among them
    slime = EMITTERS["slime"](of)
    prompts = 2048 - side.slots_per_replica
    assert "--save-interval 7\n" in slime and f"--sglang-chunked-prefill-size {prompts}\n" in slime
    areal = yaml.safe_load(EMITTERS["areal"](of))
    assert areal["saver"]["freq_steps"] == 7 and areal["sglang"]["chunked_prefill_size"] == prompts
    share = verl[f"{rollout}.gpu_memory_utilization"]
    assert (
        areal["sglang"]["mem_fraction_static"] == share and f"--sglang-mem-fraction-static {share}\n" in slime
    )


def test_slime_trains_on_the_engines_logprobs_where_none_are_computed_again() -> None:
    assert "--use-rollout-logprobs" in EMITTERS["slime"](planned(proximal=False))
    assert "--use-rollout-logprobs" not in EMITTERS["slime"](planned())


@pytest.mark.parametrize("name", ["verl", "slime", "areal", "kubernetes"])
def test_one_gpu_is_told_as_one(name: str) -> None:
    asked = PlanOptions(model="Qwen3-0.6B", num_gpus="1", response_tokens="512", max_staleness=0)
    one = make_plan(asked.request(), is_brief=True)
    assert ", 1 shared GPU, " in EMITTERS[name](one)


def test_an_unknown_exporter_names_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"did you mean 'kubernetes'\?"):
        emitter("kubernets")


def test_yaml_text_reads_back_as_it_was() -> None:
    data = {
        "text": "a: b", "lines": "one\n\n  two # not a comment\n", "yes": "no", "none": None, "flag": True,
        "number": 1e-6, "empty": {}, "nothing": [], "list": [{"a": 1, "b": {"c": [1, 2]}}, {"d": "x"}],
        "quote": '"{\\"pool\\": 1}"',
    }  # fmt: skip
    assert yaml.safe_load(to_yaml(data)) == data


@pytest.mark.parametrize("kind", ["verl", "slime", "areal", "ray", "kubernetes"])
def test_the_head_gives_the_step_with_its_range(kind: str) -> None:
    plan = planned()
    chosen = plan.require_chosen()
    span = chosen.account.step_s
    assert chosen.expected == f"{seconds(chosen.step_s)} ({seconds_range(span.low, span.high)})"
    assert chosen.expected in emitter(kind)(plan)
