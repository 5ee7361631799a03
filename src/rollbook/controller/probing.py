"""One short prompt on each replica after a publication, scored by the trainer: what digests cannot see.

A replica whose slots are all taken is not asked this time: the probe must not wait for a long response to end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.engine import Engine, GenerateRequest, Response
from rollbook.sync.config import SyncConfig
from rollbook.sync.probe import Probe, ProbeReport
from rollbook.trainer.trainer import Trainer
from rollbook.types import Floats, Ids, SamplingParams, TrainSequence

GROUP_ID = -(1 << 40)
"""Far from the groups of training and evaluation: the probe shares no draw with them."""


@dataclass(kw_only=True)
class Prober:
    """Asks a replica and scores its answer with the trainer's present weights."""

    sync: SyncConfig
    rollout: RolloutConfig
    trainer: Trainer
    prompt_ids: Ids
    """[n] int32. Some prompt; the probe's is cut or repeated from it."""
    max_context_tokens: int
    num_checked: int = 0
    """Replicas that were asked so far."""
    _probe: Probe = field(init=False)

    def __post_init__(self) -> None:
        room = min(self.max_context_tokens, self.rollout.kv_pool_tokens)
        self._num_response = min(self.sync.probe_response_tokens, max(room - 1, 1))
        num_prompt = min(self.sync.probe_prompt_tokens, max(room - self._num_response, 1))
        prompt_ids = np.resize(self.prompt_ids, num_prompt).astype(np.int32)
        self._probe = Probe(prompt_ids, factor=self.sync.probe_factor)

    async def check(
        self,
        engine: Engine,
        weight_version: int,
        compute: Callable[[Callable[[], Floats]], Awaitable[Floats]],
    ) -> ProbeReport | None:
        """The probe of one replica that was just given `weight_version`; None where it has no slot to spare.

        Args:
            compute: runs work on the trainer's thread, before its weights move again.
        Raises:
            EngineError: the engine cannot answer.
        """
        stats = await engine.stats()
        if stats.num_running + stats.num_waiting >= stats.num_slots:
            return None

        async def sample(prompt_ids: Ids) -> Response:
            return await engine.generate(
                GenerateRequest(
                    request_id=f"probe-{weight_version}",
                    prompt_ids=prompt_ids,
                    sampling=SamplingParams(
                        max_response_tokens=self._num_response,
                        temperature=self.rollout.temperature,
                        ignore_eos=True,
                    ),
                    seed=weight_version,
                    group_id=GROUP_ID,
                    member_idx=0,
                    is_last_turn=True,
                )
            )

        async def score(prompt_ids: Ids, response_ids: Ids) -> Floats:
            return await compute(lambda: self._score(prompt_ids, response_ids, weight_version))

        self.num_checked += 1
        return await self._probe.check(
            replica_id=engine.replica_id,
            weight_version=weight_version,
            engine=self.rollout.engine,
            dtype=self._dtype,
            sample=sample,
            score=score,
        )

    @property
    def _dtype(self) -> str:
        """What the gap is held against: the coarser of the two sides."""
        if self.sync.quantize != "none":
            return self.sync.quantize
        sides = {str(self.trainer.model.dtype).removeprefix("torch."), self.rollout.dtype} - {
            "auto",
            "float32",
        }
        return min(sides, default="float32")

    def _score(self, prompt_ids: Ids, response_ids: Ids, weight_version: int) -> Floats:
        token_ids = np.concatenate([prompt_ids, response_ids]).astype(np.int32)
        is_action = np.arange(len(token_ids)) >= len(prompt_ids)
        sequence = TrainSequence(
            group_id=0,
            member_idx=0,
            source="probe",
            token_ids=token_ids,
            action_mask=is_action,
            loss_mask=is_action.copy(),
            behavior_logprobs=np.zeros(len(token_ids), np.float32),
            reward=0.0,
            oldest_version=weight_version,
        )
        batch = self.trainer.make_batch([sequence], step=0, weight_version=weight_version)
        self.trainer.fill_proximal(batch)
        logprobs = batch.sequences[0].proximal_logprobs
        assert logprobs is not None
        return logprobs[is_action]
