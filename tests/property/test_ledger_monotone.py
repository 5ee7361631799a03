"""More of what helps never costs time, and more work never saves any: for every model, mode and odd size."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.ledger.account import StepAccount
from rollbook.ledger.assumptions import load_assumptions
from rollbook.ledger.decode import decode_step
from rollbook.ledger.hardware import Accelerator, Cluster, load_accelerator
from rollbook.ledger.layout import ReplicaLayout, TrainLayout
from rollbook.ledger.model import ModelSpec, load_model
from rollbook.ledger.step import Layouts, step_account
from rollbook.ledger.sync import SYNC_METHODS, SyncWork, sync_account
from rollbook.ledger.workload import MODES, Mode, Workload

DEFAULT = load_assumptions("default")
MODELS = [
    "Qwen3-0.6B",
    "Llama-3.1-8B",
    "Qwen3-32B",
    "Qwen3-30B-A3B",
    "DeepSeek-V3",
    "gpt-oss-20b",
    "Qwen3.5-35B-A3B",
]
GPUS = ["H100", "H20", "A100", "B200", "MI300X", "L40S"]
BASE = Workload(
    num_prompts=512, group_size=8, prompt_tokens=500, response_tokens=2000, max_response_tokens=16384
)

models = st.sampled_from(MODELS).map(load_model)
gpus = st.sampled_from(GPUS).map(load_accelerator)
modes = st.sampled_from(MODES)


def account(
    model: ModelSpec, gpu: Accelerator, mode: Mode, work: Workload, num_gpus: int = 64, tp: int = 16
) -> StepAccount:
    half = 0 if mode in ("sync", "colocate_async") else num_gpus // 2
    return step_account(
        model,
        work,
        Cluster(accelerator=gpu, num_gpus=num_gpus),
        DEFAULT,
        mode=mode,
        num_rollout_gpus=half,
        num_train_gpus=half,
        rollout_tp=tp,
    )


@given(model=models, gpu=gpus, mode=modes, factor=st.floats(1.05, 4))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize(
    "rate", ["hbm_bytes_per_s", "scale_up_bytes_per_s", "host_link_bytes_per_s", "nic_bytes_per_s"]
)
def test_faster_memory_and_links_never_make_a_step_longer(rate, model, gpu, mode, factor) -> None:  # type: ignore[no-untyped-def]
    faster = replace(gpu, **{rate: getattr(gpu, rate) * factor})
    slow, fast = (account(model, device, mode, BASE) for device in (gpu, faster))
    assert fast.seconds.total <= slow.seconds.total * (1 + 1e-9)


@given(model=models, gpu=gpus, mode=modes, factor=st.floats(1.05, 4))
@settings(max_examples=40, deadline=None)
def test_more_memory_never_makes_a_step_longer(model, gpu, mode, factor) -> None:  # type: ignore[no-untyped-def]
    larger = replace(gpu, hbm_bytes=round(gpu.hbm_bytes * factor))
    small, large = (account(model, device, mode, BASE) for device in (gpu, larger))
    # With room for more sequences the last ones run beside others, at a step that is longer by their KV.
    assert large.seconds.total <= small.seconds.total * 1.02


@given(model=models, gpu=gpus, mode=modes, factor=st.floats(1.05, 8))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("what", ["num_prompts", "prompt_tokens", "response_tokens", "max_response_tokens"])
def test_more_work_never_makes_a_step_shorter(what, model, gpu, mode, factor) -> None:  # type: ignore[no-untyped-def]
    more = replace(BASE, **{what: type(getattr(BASE, what))(getattr(BASE, what) * factor)})
    little, much = (account(model, gpu, mode, work) for work in (BASE, more))
    # A longer limit moves the points at which the curve of running sequences is summed.
    assert much.seconds.total >= little.seconds.total * (1 - 1e-6)


@given(model=models, gpu=gpus, mode=modes)
@settings(max_examples=40, deadline=None)
def test_more_gpus_never_make_a_step_longer_up_to_4096(model, gpu, mode) -> None:  # type: ignore[no-untyped-def]
    """As long as every replica has a sequence: 512 x 8 of them on replicas of 16."""
    totals = [
        account(model, gpu, mode, BASE, num_gpus=n).seconds.total
        for n in (64, 128, 256, 512, 1024, 2048, 4096)
    ]
    for fewer, more in pairwise(totals):
        assert more <= fewer * (1 + 1e-9)


@given(
    model=models,
    gpu=gpus,
    method=st.sampled_from(SYNC_METHODS),
    train=st.sampled_from([8, 64, 512, 2048]),
    rollout=st.sampled_from([8, 64, 512]),
)
@settings(max_examples=80, deadline=None)
def test_a_publication_grows_with_its_bytes_and_not_beyond_a_tree_with_its_nodes(  # type: ignore[no-untyped-def]
    model, gpu, method, train, rollout
) -> None:
    def seconds(num_train: int, dtype: str = "bfloat16") -> float:
        cluster = Cluster(accelerator=gpu, num_gpus=num_train + rollout)
        work = SyncWork(
            method=method,
            num_train_gpus=num_train,
            num_rollout_gpus=rollout,
            replica_gpus=8,
            weight_dtype=dtype,
        )
        return sync_account(model, cluster, DEFAULT.sync, work).seconds

    assert seconds(train, "float8") <= seconds(train)
    assert seconds(2 * train) <= 1.5 * seconds(train) + 1e-9 + DEFAULT.sync.base_s


@given(
    model=models,
    gpu=gpus,
    tp=st.sampled_from([1, 2, 4, 8]),
    rows=st.floats(1, 2000),
    context=st.floats(1, 1e6),
)
@settings(max_examples=100, deadline=None)
def test_a_token_is_never_dearer_in_a_larger_batch(model, gpu, tp, rows, context) -> None:  # type: ignore[no-untyped-def]
    def seconds(num_rows: float) -> float:
        layout = ReplicaLayout(tp_size=tp)
        cluster = Cluster(accelerator=gpu, num_gpus=8)
        step = decode_step(model, cluster, DEFAULT.decode, layout, num_rows=num_rows, context_tokens=context)
        return float(step.seconds)

    assert seconds(rows) <= seconds(2 * rows) * (1 + 1e-9) <= 2 * seconds(rows) * (1 + 1e-9)


@given(model=models, cp=st.sampled_from([2, 4, 8]), pp=st.sampled_from([2, 4, 8]))
@settings(max_examples=30, deadline=None)
def test_splitting_sequences_and_layers_is_charged(model, cp, pp) -> None:  # type: ignore[no-untyped-def]
    """A ring of context parallelism exchanges keys and values; a pipeline fills and drains, also without being told how
    many micro batches it has."""
    cluster = Cluster(accelerator=load_accelerator("H100"), num_gpus=64)

    def train_s(layout: TrainLayout) -> float:
        layouts = Layouts(replica=ReplicaLayout(tp_size=16), train=layout)
        return step_account(
            model, BASE, cluster, replace(DEFAULT, stack="megatron"), layouts=layouts
        ).seconds.train

    plain = train_s(TrainLayout())
    assert train_s(TrainLayout(cp_size=cp)) > plain
    assert train_s(TrainLayout(pp_size=pp)) > plain
    assert train_s(TrainLayout(pp_size=pp, micro_batches_per_step=1)) > train_s(TrainLayout(pp_size=pp))


@pytest.mark.parametrize("gpu", ["H100", "GB200"])
def test_experts_beyond_a_scale_up_domain_cost_by_what_leaves_it(gpu: str) -> None:
    """One GPU more than the domain sends a small share over the network: no cliff at its edge."""
    device, model = load_accelerator(gpu), load_model("DeepSeek-V3")

    def exchange_s(ep_size: int) -> float:
        step = decode_step(
            model,
            Cluster(accelerator=device, num_gpus=ep_size),
            DEFAULT.decode,
            ReplicaLayout(tp_size=1, ep_size=ep_size, weight_dtype="float8"),
            num_rows=128.0 * ep_size,
            context_tokens=2000.0,
        )
        return float(step.exchange_s)

    domain = device.scale_up_gpus
    inside, edge, far = (exchange_s(n) for n in (domain, domain + 1, 16 * domain))
    hops_s = (
        model.num_moe_layers * 2 * (DEFAULT.decode.cross_node_latency_s - DEFAULT.decode.all_reduce_latency_s)
    )
    assert inside < edge < inside + hops_s + (far - inside) / domain * 2
    assert edge < far
