"""What `[cluster]` refuses before anything starts, and what its publisher says to those who want its ports."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import AsyncExitStack

import pytest

from rollbook.controller.startable import unstartable
from rollbook.errors import ConfigError
from tiny_run import tiny_config


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"cluster.num_trainer_ranks": 2}, "cluster.num_trainer_ranks is 2 and cluster.kind 'inproc'"),
        ({"cluster.kind": "ray", "sync.transport": "ipc"}, "sync.transport is 'ipc'"),
        (
            {"cluster.kind": "ray", "rollout.engine": "vllm", "rollout.vllm.in_process": False},
            "rollout.vllm.in_process is false and cluster.kind 'ray'",
        ),
        ({"cluster.kind": "ray", "memory.offload": True}, "memory.offload true, and cluster.kind is 'ray'"),
        (
            {"cluster.kind": "ray", "cluster.num_trainer_ranks": 2, "model.lora": {"publish": "merged"}},
            "cluster.num_trainer_ranks is 2 with model.lora",
        ),
    ],
)
def test_what_cannot_run_in_several_processes_is_refused(overrides: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        tiny_config(**overrides).check()
    assert told in str(raised.value)
    assert "hint: " in str(raised.value)


def test_one_process_and_ray_with_shared_memory_are_accepted() -> None:
    tiny_config().check()
    tiny_config(**{"cluster.kind": "ray", "cluster.num_trainer_ranks": 2}).check()
    tiny_config(**{"cluster.kind": "ray", "sync.transport": "shm"}).check()
    tiny_config(**{"cluster.kind": "ray", "sync.transport": "broadcast"}).check()


@pytest.mark.parametrize("overrides", [{"sync.transport": "ipc"}, {"memory.offload": True}], ids=str)
def test_what_ray_does_not_do_is_one_problem_with_one_remedy(overrides: dict[str, object]) -> None:
    config = tiny_config(**{"cluster.kind": "ray", **overrides})
    with pytest.raises(ConfigError) as caught:
        config.check(unstartable(config))
    assert "problems" not in str(caught.value)


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:1", "[::1]:1"])
async def test_where_no_ray_cluster_is_the_address_is_named(address: str) -> None:
    """Where nobody listens Ray is not even asked: it would try for more than a minute."""
    pytest.importorskip("ray", reason="Ray is not installed (extra `ray`)")
    from rollbook.cluster.placement import connect

    config = tiny_config(**{"cluster.kind": "ray", "cluster.address": address})
    with pytest.raises(ConfigError, match=re.escape(f"cluster.address is '{address}'")):
        await connect(config.cluster, 1, AsyncExitStack())


async def test_who_listens_and_is_no_ray_cluster_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (extra `ray`)")
    from rollbook.cluster import placement

    gives_up = threading.Event()
    monkeypatch.setattr(placement.ray, "init", lambda **keywords: gives_up.wait())
    monkeypatch.setattr(placement, "JOIN_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        config = tiny_config(**{"cluster.kind": "ray", "cluster.address": address})
        with pytest.raises(ConfigError, match=f"'{address}'.*did not answer as one within 0.01 s"):
            await placement.connect(config.cluster, 1, AsyncExitStack())
    gives_up.set()
