"""The plan as Kubernetes manifests: a KubeRay job with GPU pools, a CPU pool, and gang scheduling.

All pods of a job start together or not at all: the cluster's `PodGroup` counts every pod, fixed sizes forbid
autoscaling, and a rollout pool without its trainer never holds GPUs.
"""

from __future__ import annotations

from rollbook.planner.execution import execution
from rollbook.planner.plan import Plan
from rollbook.planner.pools import Pool, pools
from rollbook.planner.run_toml import run_toml
from rollbook.planner.words import MODE_TITLES, split_gpus
from rollbook.planner.yaml_text import to_yaml

_IMAGE = "rollbook:latest"
_HEAD_CORES = 8
_HEAD_GIB = 32
_MOUNT = "/etc/rollbook"


def kubernetes_yaml(plan: Plan) -> str:
    """ConfigMap with the run.toml, PodGroup, and RayJob.

    Raises:
        PlanError: nothing fits.
    """
    chosen = plan.require_chosen()
    r = plan.request
    name = _name(plan)
    found = pools(plan, chosen)
    num_pods = 1 + sum(pool.num_nodes for pool in found)
    documents: list[dict[str, object]] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{name}-config"},
            "data": {"run.toml": run_toml(plan)},
        },
        {
            "apiVersion": "scheduling.x-k8s.io/v1alpha1",
            "kind": "PodGroup",
            "metadata": {"name": name},
            "spec": {"minMember": num_pods, "scheduleTimeoutSeconds": 3600},
        },
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {"name": name, "labels": _labels(name, "job")},
            "spec": {
                "entrypoint": f"rollbook train {_MOUNT}/run.toml",
                "shutdownAfterJobFinishes": True,
                "ttlSecondsAfterFinished": 600,
                "submissionMode": "K8sJobMode",
                "rayClusterSpec": {
                    "headGroupSpec": {
                        "rayStartParams": {"num-gpus": "0"},
                        "template": _pod(name, "head", cores=_HEAD_CORES, gib=_HEAD_GIB, gpus=0),
                    },
                    "workerGroupSpecs": [_workers(name, pool) for pool in found],
                },
            },
        },
    ]
    head = (
        f"# {r.model.name} on {r.cluster.num_gpus} {r.cluster.accelerator.name}: {MODE_TITLES[chosen.mode]}, "
        f"{split_gpus(*chosen.split, chosen.mode)}, {chosen.expected} a step expected.\n"
        f"# Because {plan.choice_because}.\n"
        f"# Gang: {num_pods} pods or none. Needs KubeRay and the scheduler-plugins coscheduling PodGroup.\n"
    )
    if why := execution(r, chosen).why_not:
        head = (
            f"# NOT RUNNABLE as it stands, put another trainer's command for the entrypoint: {why}.\n{head}"
        )
    return head + "---\n".join(to_yaml(document) for document in documents)


def _name(plan: Plan) -> str:
    raw = f"rollbook-{plan.request.model.name.lower()}-{plan.request.cluster.num_gpus}gpu"
    return "".join(c if c.isalnum() or c == "-" else "-" for c in raw)[:50].strip("-")


def _labels(name: str, role: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "rollbook", "app.kubernetes.io/instance": name, "rollbook/role": role}


def _workers(name: str, pool: Pool) -> dict[str, object]:
    gib = pool.host_bytes_per_node // 2**30
    return {
        "groupName": pool.name,
        "replicas": pool.num_nodes,
        "minReplicas": pool.num_nodes,
        "maxReplicas": pool.num_nodes,
        "rayStartParams": {"resources": f'"{{\\"pool_{pool.name}\\": 1}}"'},
        "template": _pod(name, pool.name, cores=pool.cores_per_node, gib=gib, gpus=pool.gpus_per_node),
    }


def _pod(name: str, role: str, *, cores: int, gib: int, gpus: int) -> dict[str, object]:
    resources: dict[str, object] = {"cpu": str(cores), "memory": f"{gib}Gi"}
    if gpus:
        resources["nvidia.com/gpu"] = str(gpus)
    container: dict[str, object] = {
        "name": f"ray-{role}",
        "image": _IMAGE,
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [
            {"name": "config", "mountPath": _MOUNT, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    spec: dict[str, object] = {
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": f"{name}-config"}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{max(gib // 4, 1)}Gi"}},
        ],
    }
    if gpus:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    labels = {**_labels(name, role), "scheduling.x-k8s.io/pod-group": name}
    return {"metadata": {"labels": labels}, "spec": spec}
