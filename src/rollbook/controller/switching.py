"""The device that engine and trainer own in turn: the moves of each step, recorded beside what the ledger expects.

    to_trainer      pause ► engine sleeps ► release ► training state to device
    make_room       gradients dropped ► training state to host ► release ► engine wakes     before the publication
    to_engine       resume                                                                  after it

With `[memory]` at its defaults nothing moves: the engine pauses and resumes. The order and its reasons are
`memory/handover.py`'s. A plan rehearses the moves before the first step, and expects what they took.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from rollbook.checkpoint.checkpoint import Written
from rollbook.config.run_config import RunConfig
from rollbook.controller.calibrate import rounds
from rollbook.errors import ConfigError
from rollbook.ledger.assumptions import load_assumptions
from rollbook.ledger.hardware import Cluster, load_accelerator
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.switch import SleepChoice
from rollbook.ledger.switch import hand_over as expected_moves
from rollbook.memory.handover import (
    Expectation,
    Move,
    MoveReport,
    after_publication,
    before_publication,
    hand_over,
    to_trainer,
    wake_engine,
)
from rollbook.memory.parking import Parking
from rollbook.memory.register import Owner, Reading, Register
from rollbook.modeling.load import DTYPES
from rollbook.observe.recorder import Recorder
from rollbook.rollout.router import Router
from rollbook.trainer.trainer import Trainer

TRAINING_STATE, FROZEN_MODELS = "training state", "frozen models"
"""The ledger's names for what moves together."""
Half = Literal["to_trainer", "make_room", "to_engine"]
HALVES: tuple[Half, ...] = ("to_trainer", "make_room", "to_engine")
FROZEN: tuple[Owner, ...] = ("reference", "teacher")


class DeviceSwitch:
    """Carries out the hand-overs of a run. Called from the event loop, while no stage computes."""

    def __init__(self, config: RunConfig, router: Router, trainer: Trainer, recorder: Recorder) -> None:
        self.config = config
        self.trainer = trainer
        self.recorder = recorder
        self.device = trainer.model.device
        self._engines = _Engines(router, config)
        self._router = router
        self._state: list[Parking] | None = None
        self._weight_bytes = sum(spec.num_bytes for spec in trainer.weight_specs())
        self._table: Mapping[str, Expectation] | None = None
        """The ledger's, by move; read once the state to park is known."""
        self._measured: dict[Half, list[Expectation]] = {}
        """The rehearsal's, in the order of the moves."""
        self._is_asleep = False

    @property
    def needs_publication(self) -> bool:
        """The engines dropped their weights: they serve nothing before the next publication."""
        return self._is_asleep and self.config.memory.sleep_level == 2

    async def to_trainer(self) -> None:
        """The trainer has the device, with all of its state."""
        if not self.config.memory.moves_anything:
            await self._hand_over("to_trainer", self._moves("to_trainer"))
            return
        await self._carry_out("to_trainer")
        self._is_asleep = self.config.memory.sleep_level > 0
        self._read("train")

    async def make_room(self) -> None:
        """What the publication does not need has left, and the engine holds memory for its weights."""
        if self.config.memory.moves_anything:
            await self._carry_out("make_room")

    async def to_engine(self) -> None:
        """The engine decodes."""
        self._is_asleep = False
        if not self.config.memory.moves_anything:
            await self._hand_over("to_engine", self._moves("to_engine"))
            return
        await self._carry_out("to_engine")
        self._read("rollout")

    async def rehearse(
        self, *, train: Callable[[], Awaitable[object]], publish: Callable[[], Awaitable[object]]
    ) -> None:
        """Carry out a hand-over and back, several times and unrecorded. What a move took in the median is expected of
        it from then on, without the first time, which pins buffers and maps memory.

        Args:
            train: leaves the device's memory as a step's updates do, which takes long to give back. This and the
                publication are left out where no memory moves.
            publish: gives every engine its weights.
        """
        took: dict[Half, list[list[MoveReport]]] = {half: [] for half in HALVES}
        for _ in rounds([None], warm_up=None):
            for half in HALVES:
                if self.config.memory.moves_anything and half == "make_room":
                    await train()
                if self.config.memory.moves_anything and half == "to_engine":
                    await publish()
                took[half].append(await self._hand_over(half, self._moves(half)))
        self._measured = {
            half: [
                Expectation(move[-1].num_bytes, median(report.seconds for report in move))
                for move in zip(*reports[1:], strict=True)
            ]
            for half, reports in took.items()
        }

    def expected(self, half: Half) -> Expectation | None:
        """Of all moves of a half together; None before `rehearse`."""
        measured = self._measured.get(half)
        if measured is None:
            return None
        moves = [self._expected_of(half, place, move.name) for place, move in enumerate(self._moves(half))]
        known = [move for move in moves if move is not None]
        return Expectation(sum(move.bytes for move in known), sum(move.seconds for move in known))

    def _expected_of(self, half: Half, place: int, name: str) -> Expectation | None:
        """The ledger's bytes, and the seconds that the rehearsal took; without one the ledger's, too."""
        by_ledger = self._by_ledger().get(name)
        if half not in self._measured:
            return by_ledger
        measured = self._measured[half][place]
        return measured if by_ledger is None else replace(by_ledger, seconds=measured.seconds)

    def _by_ledger(self) -> Mapping[str, Expectation]:
        if self._table is None:
            is_cuda = self.device.type == "cuda"
            self._table = self.by_ledger(torch.cuda.get_device_name(self.device)) if is_cuda else {}
        return self._table

    def _moves(self, half: Half) -> list[Move]:
        memory = self.config.memory
        if half == "to_engine":
            return after_publication(self._engines)
        if not memory.moves_anything:
            pause, *_ = to_trainer(self._engines, [], self.device, sleep_level=0)
            return [pause] if half == "to_trainer" else []
        if half == "to_trainer":
            return to_trainer(
                self._engines,
                self._parked(),
                self.device,
                sleep_level=memory.sleep_level,
                weight_bytes=self._linked_bytes,
            )
        moves = before_publication(self._drop_gradients, self._parked(), self.device)
        if memory.sleep_level:
            moves += wake_engine(self._engines, weight_bytes=self._linked_bytes)
        return moves

    def write_state(self, folder: Path) -> Written:
        """The trainer's, also while parts of it are in host memory."""
        return self.trainer.write_state(folder, self._readable)

    # ---- what moves

    def _parked(self) -> list[Parking]:
        """Made at the first hand-over: until then a warm-up may replace the reference."""
        if self._state is None:
            owned = self._training_state() if self.config.memory.offload else {}
            self._state = []
            for name, is_frozen in ((TRAINING_STATE, False), (FROZEN_MODELS, True)):
                chosen = [t for owner, held in owned.items() if (owner in FROZEN) == is_frozen for t in held]
                here = [tensor for tensor in chosen if tensor.device == self.device]
                if here:
                    self._state.append(Parking(name, here, is_constant=is_frozen))
        return self._state

    def _training_state(self) -> dict[Owner, list[Tensor]]:
        """What only the trainer's own stages read: a publication needs none of it."""
        trainer = self.trainer
        owned: dict[Owner, list[Tensor]] = {
            "master weights": _masters(trainer),
            "optimizer moments": [*trainer.optimizer.means, *trainer.optimizer.mean_squares],
        }
        if trainer.critic is not None:
            critic = trainer.critic.optimizer
            held = {id(p) for p in trainer.optimizer.parameters}
            own = [p for p in critic.parameters if id(p) not in held]
            owned["critic"] = [p.detach() for p in own] + [
                *critic.masters,
                *critic.means,
                *critic.mean_squares,
            ]
        if trainer.reference is not None:
            owned["reference"] = [t.detach() for t in trainer.reference.named_tensors().values()]
        if trainer.teacher is not None:
            owned["teacher"] = [p.detach() for p in trainer.teacher.module.parameters()]
        return owned

    @property
    def _linked_bytes(self) -> int:
        """Of the engines' weights at level 1, where they cross to the host and back."""
        on_host = self.config.rollout.device == "cpu" or self.config.memory.sleep_level != 1
        return 0 if on_host else self._weight_bytes * len(self._router.engines)

    def _drop_gradients(self) -> None:
        self.trainer.optimizer.clear()
        if self.trainer.critic is not None:
            self.trainer.critic.optimizer.clear()

    # ---- what is recorded

    @cached_property
    def _model(self) -> ModelSpec:
        return ModelSpec.from_hf_config(self.trainer.model.hf_config())

    async def _carry_out(self, half: Half) -> None:
        recorded = [
            self._recorded(move, self._expected_of(half, place, move.name))
            for place, move in enumerate(self._moves(half))
        ]
        await self._hand_over(half, recorded)

    async def _hand_over(self, half: Half, moves: Sequence[Move]) -> list[MoveReport]:
        """Within the deadline of each move; engines that drain have as long as a response may take."""
        deadline_s, rollout = self.config.memory.move_deadline_s, self.config.rollout
        if half == "to_trainer" and rollout.pause_mode == "drain":
            deadline_s += rollout.response_deadline_s
        return await hand_over(moves, self.device, deadline_s=deadline_s)

    def _recorded(self, move: Move, wanted: Expectation | None) -> Move:
        """The move inside a span of its name, with the bytes and seconds expected of it."""

        async def run() -> int:
            free = _free_bytes(self.device)
            with self.recorder.span(move.name, expected_s=None if wanted is None else wanted.seconds) as span:
                num_bytes = await move.run()
                span.set(bytes=num_bytes, freed_bytes=_free_bytes(self.device) - free)
                if wanted is not None:
                    span.set(expected_bytes=round(wanted.bytes))
            return num_bytes

        return replace(move, run=run)

    def by_ledger(self, device_name: str) -> dict[str, Expectation]:
        """Bytes and seconds of the moves on a device of the ledger's table; empty for any other."""
        try:
            accelerator = load_accelerator(device_name)
        except ConfigError:
            return {}
        model = self._model
        parked = {parking.name: parking.num_bytes for parking in self._parked()}
        moves = expected_moves(
            model,
            Cluster(accelerator=accelerator, num_gpus=1),
            load_assumptions("default").switch,
            num_gpus=1,
            rollout_weights_bytes_per_gpu=float(self._weight_bytes * len(self._router.engines)),
            state_bytes_per_param=parked.get(TRAINING_STATE, 0) / model.params,
            frozen_bytes_per_param=parked.get(FROZEN_MODELS, 0) / model.params,
            choice=SleepChoice(sleep_level=self.config.memory.sleep_level),
            offloads_state=bool(parked),
        )
        return {move.name: Expectation(move.bytes, move.seconds) for move in moves}

    def _read(self, point: Literal["train", "rollout"]) -> None:
        """Who holds which bytes of the device now, beside what the ledger's arithmetic says of them."""
        register = Register(
            {(owner, str(self.device)): wanted for owner, wanted in self._owned_by_ledger(point).items()}
        )
        parameters = self.trainer.optimizer.parameters
        register.add("weights", lambda: [p.detach() for p in self.trainer.model.module.parameters()])
        register.add("gradients", lambda: [p.grad for p in parameters if p.grad is not None])
        for owner, tensors in self._training_state().items():
            register.add(owner, lambda tensors=tensors: tensors)  # type: ignore[misc]
        for engine in self._router.engines:
            for held_by, held in _of_engine(engine).items():
                register.add(held_by, lambda held=held: held)  # type: ignore[misc]
        reading = register.read(point)
        self.recorder.metrics(reading.values())
        self.recorder.event("memory", **_as_event(reading, str(self.device)))

    def _owned_by_ledger(self, point: Literal["train", "rollout"]) -> dict[Owner, float]:
        """Bytes that each owner should hold of the device: parameters times bytes, tokens times bytes. Empty with
        adapters, whose owners are parts of the model."""
        trainer, memory, rollout = self.trainer, self.config.memory, self.config.rollout
        if trainer.model.lora is not None:
            return {}
        model = self._model
        expected: dict[Owner, float] = {"weights": model.params * trainer.model.dtype.itemsize}
        if point == "train" or not memory.offload:
            if _masters(trainer):
                expected["master weights"] = model.params * 4
            expected["optimizer moments"] = model.params * 8
            if trainer.reference is not None:
                expected["reference"] = model.params * trainer.model.dtype.itemsize
        if self.device == torch.device(rollout.device) and (point == "rollout" or not memory.sleep_level):
            engines = [engine for engine in self._router.engines if _of_engine(engine)]
            width = (trainer.export_dtype if rollout.dtype == "auto" else DTYPES[rollout.dtype]).itemsize
            pages = rollout.kv_pool_tokens // rollout.page_tokens * rollout.page_tokens
            if engines and rollout.engine == "native":
                expected["KV pool"] = len(engines) * pages * model.kv_bytes_per_token(width)
        return expected

    def _readable(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            for parking in self._state or ():
                value = parking.readable(value)
            return value
        if isinstance(value, Mapping):
            return {key: self._readable(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._readable(inner) for inner in value)
        return value


class _Engines:
    """All replicas as the one engine of a hand-over."""

    def __init__(self, router: Router, config: RunConfig) -> None:
        self._router = router
        self._pause_mode = config.rollout.pause_mode

    async def pause(self, mode: Literal["keep"] = "keep") -> None:
        """As `rollout.pause_mode` says."""
        await self._router.pause(self._pause_mode)

    async def resume(self) -> None:
        await self._router.resume()

    async def sleep(self, level: int = 1) -> None:
        await self._router.sleep(level)

    async def wake(self) -> None:
        await self._router.wake()


def _masters(trainer: Trainer) -> list[Tensor]:
    """Master weights that are not the weights the model computes with."""
    pairs: Iterable[tuple[Tensor, Tensor]] = zip(trainer.optimizer.masters, trainer.optimizer.parameters)
    return [m for m, p in pairs if m.untyped_storage()._cdata != p.untyped_storage()._cdata]


def _of_engine(engine: object) -> dict[Owner, list[Tensor]]:
    """An engine's tensors of this process; an engine elsewhere tells none."""
    tell = getattr(engine, "device_tensors", None)
    held: dict[Owner, list[Tensor]] = {} if tell is None else tell()
    return held


def _as_event(reading: Reading, device: str) -> dict[str, Any]:
    state = next((s for s in reading.devices if s.device == device), reading.devices[0])
    return {
        "point": reading.point,
        "device": state.device,
        "allocated_bytes": state.allocated_bytes,
        "reserved_bytes": state.reserved_bytes,
        "free_bytes": state.free_bytes,
        "owners": {h.owner: h.num_bytes for h in reading.holdings if h.device == state.device},
    }


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0
