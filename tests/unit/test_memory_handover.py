"""The moves of a switch: order, bytes, tensors that come back as they were, and what a stuck move says."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
import torch

from rollbook.errors import DeadlineError, RunError
from rollbook.memory.handover import (
    Expectation,
    Move,
    after_publication,
    before_publication,
    hand_over,
    to_trainer,
    wake_engine,
)
from rollbook.memory.parking import Parking

CPU = torch.device("cpu")


class Engine:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    async def pause(self, mode: Literal["keep"] = "keep") -> None:
        self.log.append("pause")

    async def resume(self) -> None:
        self.log.append("resume")

    async def sleep(self, level: int = 1) -> None:
        self.log.append(f"sleep {level}")

    async def wake(self) -> None:
        self.log.append("wake")


def optimizer() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    model = torch.nn.Linear(30, 20)
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(30)).sum().backward()
    adam.step()
    return model, adam


def moments(adam: torch.optim.AdamW) -> list[torch.Tensor]:
    return [state[key] for state in adam.state.values() for key in ("exp_avg", "exp_avg_sq")]


def test_parked_tensors_come_back_into_the_same_objects() -> None:
    model, adam = optimizer()
    held = moments(adam)
    before = [tensor.clone() for tensor in held]
    parking = Parking("optimizer moments", held)
    assert parking.num_bytes == 2 * 4 * (30 * 20 + 20)
    assert parking.to_host() == parking.num_bytes
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in held)
    assert parking.to_host() == 0  # it is there already
    assert parking.to_device() == parking.num_bytes
    assert parking.to_device() == 0
    for tensor, old in zip(held, before, strict=True):
        assert torch.equal(tensor, old)
    model(torch.ones(30)).sum().backward()
    adam.step()  # the optimizer never noticed


def test_what_nobody_writes_is_copied_to_the_host_once() -> None:
    frozen = torch.arange(8, dtype=torch.float32)
    parking = Parking("frozen models", [frozen], is_constant=True)
    moved = [(parking.to_host(), parking.to_device()) for _ in range(3)]
    assert moved == [(32, 32), (0, 32), (0, 32)]
    assert frozen.tolist() == list(range(8))


def test_parked_tensors_can_be_read_where_they_lie() -> None:
    base = torch.arange(24, dtype=torch.float32)
    view, other = base[4:16].view(3, 4).t(), torch.ones(3)
    parking = Parking("training state", [base])
    wanted = view.clone()
    parking.to_host()
    assert torch.equal(parking.readable(view), wanted)
    assert parking.readable(view).stride() == view.stride()
    assert parking.readable(other) is other  # of no owner here
    parking.to_device()
    assert parking.readable(view) is view


def test_training_goes_on_bit_for_bit_after_a_switch() -> None:
    torch.manual_seed(0)
    moved, moved_adam = optimizer()
    torch.manual_seed(0)
    still, still_adam = optimizer()
    parking = Parking("training state", [*moved.parameters(), *moments(moved_adam)])
    for _ in range(3):
        parking.to_host()
        parking.to_device()
        for model, adam in ((moved, moved_adam), (still, still_adam)):
            adam.zero_grad()
            model(torch.linspace(0, 1, 30)).square().sum().backward()
            adam.step()
    assert torch.equal(moved.weight, still.weight)


def test_views_of_one_storage_move_once_and_the_host_buffer_is_allocated_once() -> None:
    base = torch.arange(100, dtype=torch.float32)
    parking = Parking("weights", [base, base[:50], base.view(10, 10)])
    assert parking.num_bytes == 400
    addresses = set()
    for _ in range(3):
        parking.to_host()
        assert parking._host is not None
        addresses.add(parking._host.data_ptr())
        parking.to_device()
    assert len(addresses) == 1
    assert base.view(10, 10)[9, 9] == 99


def test_tensors_of_two_devices_are_refused() -> None:
    with pytest.raises(RunError, match="optimizer lies on cpu, meta"):
        Parking("optimizer", [torch.zeros(1), torch.zeros(1, device="meta")])


async def test_a_switch_and_back_in_order() -> None:
    log: list[str] = []
    engine = Engine(log)
    model, adam = optimizer()
    parking = Parking("training state", moments(adam))
    parking.to_host()

    def drop() -> None:
        adam.zero_grad(set_to_none=True)
        log.append("drop gradients")

    expected = {"training state to device": Expectation(bytes=5000, seconds=0.5)}
    there = await hand_over(
        to_trainer(engine, [parking], CPU, sleep_level=2), CPU, deadline_s=10, expected=expected
    )
    assert [report.name for report in there] == [
        "pause",
        "engine sleeps",
        "release",
        "training state to device",
    ]
    assert there[-1].num_bytes == parking.num_bytes == 4960
    assert (there[-1].expected_bytes, there[-1].expected_s) == (5000, 0.5)
    assert there[0].expected_s is None
    assert not parking.is_parked

    back = await hand_over(before_publication(drop, [parking], CPU), CPU, deadline_s=10)
    back += await hand_over(wake_engine(engine), CPU, deadline_s=10)
    log.append("publish")
    back += await hand_over(after_publication(engine), CPU, deadline_s=10)
    assert log == ["pause", "sleep 2", "drop gradients", "wake", "publish", "resume"]
    assert parking.is_parked
    assert all(parameter.grad is None for parameter in model.parameters())
    assert sum(report.num_bytes for report in back) == 4960


def test_every_move_says_why_it_stands_there() -> None:
    engine = Engine([])
    parking = Parking("training state", [torch.zeros(3)])
    moves = [
        *to_trainer(engine, [parking], CPU, sleep_level=1),
        *before_publication(lambda: None, [parking], CPU),
        *wake_engine(engine),
        *after_publication(engine),
    ]
    assert all(len(move.because.split()) >= 4 for move in moves)


async def test_a_stuck_move_names_itself_and_what_was_done() -> None:
    async def quick() -> int:
        return 1

    async def stuck() -> int:
        await asyncio.Event().wait()
        return 0

    moves = [Move(name="pause", because="", run=quick), Move(name="engine sleeps", because="", run=stuck)]
    with pytest.raises(
        DeadlineError, match=r"'engine sleeps' of a hand-over of cpu took longer than 0.05 s \(done: pause"
    ):
        await hand_over(moves, CPU, deadline_s=0.05)
