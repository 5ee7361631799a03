"""Generation on the trainer's device while the trainer waits for its groups.

    begin    bring up and put away twice: what a lending costs, and that it works
    a wait   saving = (expected wait - seconds to bring up) x share of the tokens; lent if it exceeds the cost
             bring up    wake the engine, re-sync it (the same proven transaction), probe it
             serve       it joins the router; the replicas give back what is more than their share
    groups   put away    it leaves the router; what it has not finished goes on elsewhere from its own tokens;
    are there            keys, values and weights of its own are dropped

One more native engine, asleep between lendings. It serves the newest published version or nothing, so that labels, the
staleness bound and the account of groups are those of any replica. What fails leaves the run as it was without it: said
once, and nothing is lent any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rollbook.controller.config import LendingSection
from rollbook.controller.replicas import Replica
from rollbook.errors import RunError, SyncError
from rollbook.observe.recorder import Recorder
from rollbook.observe.values import Last, Total, Values
from rollbook.rollout.engine import Engine
from rollbook.rollout.native.engine import NativeEngine
from rollbook.rollout.router import Router
from rollbook.sync.publisher import Publisher

Result = TypeVar("Result")

SHARE_WEIGHT = 0.3
"""Of the newest lending in the running mean of its share of the tokens."""


class Lending:
    """The lent engine of a run, and the decision when it serves. Called from the event loop, between two stages.

    Args:
        replica: the lent engine, awake, and the port of its weights. It belongs to no router and no publisher yet.
        probe: why an engine does not give the trainer's logprobs, or nothing.
    """

    def __init__(
        self,
        config: LendingSection,
        replica: Replica,
        *,
        router: Router,
        publisher: Publisher,
        probe: Callable[[Engine], Awaitable[str]],
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert isinstance(replica.engine, NativeEngine)
        self.config = config
        self.engine = replica.engine
        self.replica_id = replica.engine.replica_id
        self.expected_wait_s = 0.0
        """What the trainer would wait for the next groups if nothing were lent: the last wait, and what a lending saved
        of it."""
        self.up_s = 0.0
        """Seconds from asleep to serving, measured last."""
        self.back_s = 0.0
        """Seconds from serving to asleep, which the trainer waits."""
        self.share = 1 / (len(router.engines) + 1)
        """Of the tokens sampled while it serves: its own. A running mean; before the first lending an equal part."""
        self.failed = ""
        """Why nothing is lent any more."""
        self.num_tokens = 0
        """Sampled by it since `pop_tokens`."""
        self._port = replica.port
        self._router, self._publisher = router, publisher
        self._probe, self._recorder, self._clock = probe, recorder, clock
        self._own: Sequence[Engine] = list(router.engines)
        self._serving_at_s: float | None = None
        self._tokens_then = (0, 0)
        """Decoded by it and by the other replicas when it began to serve."""

    async def rehearse(self) -> None:
        """Bring it up and put it away, before the first step: what that costs, the second time.

        Raises:
            RunError: it cannot be done.
        """
        await self.engine.sleep(2)
        for _ in range(2):
            began_at_s = self._clock()
            await self._bring_up()
            self.up_s = self._clock() - began_at_s
            await self._put_away()
            self.back_s = self._clock() - began_at_s - self.up_s

    def pays(self) -> bool:
        """Whether the next wait is expected to be shortened by more than a lending costs."""
        saved_s = max(self.expected_wait_s - self.up_s, 0.0) * self.share
        return not self.failed and saved_s >= self.config.margin * (self.up_s + self.back_s)

    async def during(self, wait: Awaitable[Result], *, is_published: bool) -> Result:
        """Await `wait`; meanwhile the engine serves if that pays.

        Args:
            is_published: the trainer's weights are those of the newest publication. Others are lent nothing.
        """
        began_at_s = self._clock()
        serving = asyncio.create_task(self._serve()) if is_published and self.pays() else None
        saved_s = waited_s = 0.0
        try:
            return await wait
        finally:
            waited_s = self._clock() - began_at_s
            if serving is not None:
                saved_s = await self._take_back(serving)
            self.expected_wait_s = waited_s + saved_s

    def pop_tokens(self) -> int:
        """Tokens it sampled since the last call."""
        num_tokens, self.num_tokens = self.num_tokens, 0
        return num_tokens

    # ---- up and back

    async def _serve(self) -> None:
        began_at_s = self._clock()
        try:
            await self._bring_up()
        except RunError as error:
            self._fail(error)
            return
        self.up_s = self._clock() - began_at_s
        self._tokens_then = await self._num_decoded()
        self._router.add(self.engine)
        self._serving_at_s = self._clock()
        num_moved = await self._share_out()
        self._recorder.event(
            "lent",
            replica_id=self.replica_id,
            weight_version=self._publisher.weight_version,
            expected_wait_s=self.expected_wait_s,
            up_s=self.up_s,
            num_moved=num_moved,
        )

    async def _bring_up(self) -> None:
        """Raises RunError where it does not hold the newest version, proven."""
        await self.engine.wake()
        self._publisher.join(self._port)
        await self._publisher.resync(self.replica_id)
        await self.engine.resume()
        if why := await self._probe(self.engine):
            raise SyncError(why, "sync.probe = false goes on regardless")

    async def _share_out(self) -> int:
        """The other replicas give back what is more than an equal share; the router gives most of it to this one."""
        num_open = self._router.num_open()
        fair = -(-sum(num_open.values()) // len(num_open))
        num_moved = 0
        for engine in self._own:
            excess = num_open.get(engine.replica_id, 0) - fair
            if excess > 0 and isinstance(engine, NativeEngine):
                with contextlib.suppress(RunError):  # of a replica that is down: the router sees that
                    await engine.give_back(excess)
                    num_moved += excess
        return num_moved

    async def _take_back(self, serving: asyncio.Task[None]) -> float:
        """The trainer needs its device, however far the lending is. Returns the seconds of waiting that it saved."""
        began_at_s = self._clock()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        num_returned = self._router.num_open().get(self.replica_id, 0)
        is_dead = self._router.out_of_service.get(self.replica_id, "")
        self._router.remove(self.replica_id)
        try:
            if is_dead:
                raise SyncError(is_dead, "the run goes on without it")
            await self._put_away()
        except RunError as error:
            self._fail(error)
        self.back_s = self._clock() - began_at_s
        lent_s, saved_s, cost_s = 0.0, 0.0, self.back_s
        if self._serving_at_s is not None:
            lent_s, cost_s = began_at_s - self._serving_at_s, self.up_s + self.back_s
            saved_s = self._account(lent_s, await self._num_decoded())
        self._serving_at_s = None
        self._recorder.event(
            "taken_back",
            replica_id=self.replica_id,
            lent_s=lent_s,
            back_s=self.back_s,
            saved_s=saved_s,
            num_tokens=self.num_tokens,
            num_returned=num_returned,
        )
        values: Values = {
            "lending/lent_s": Total(lent_s),
            "lending/cost_s": Total(cost_s),
            "lending/saved_s": Total(saved_s),
            "lending/num_tokens": Total(self.num_tokens),
            "lending/num_returned": Total(num_returned),
            "lending/token_share": Last(self.share),
        }
        self._recorder.metrics(values)
        return saved_s

    async def _put_away(self) -> None:
        self._publisher.leave(self.replica_id)
        await self.engine.pause("abort")
        await self.engine.sleep(2)

    def _account(self, lent_s: float, tokens_now: tuple[int, int]) -> float:
        """Without it the others had made its tokens too, at their own pace."""
        lent, own = (now - then for now, then in zip(tokens_now, self._tokens_then, strict=True))
        self.num_tokens += lent
        if lent + own:
            self.share += SHARE_WEIGHT * (lent / (lent + own) - self.share)
        return lent_s * lent / max(own, 1)

    async def _num_decoded(self) -> tuple[int, int]:
        own = [(await engine.stats()).decode_tokens for engine in self._own]
        return (await self.engine.stats()).decode_tokens, sum(own)

    def _fail(self, error: RunError) -> None:
        if self.failed:  # a first reason says more
            return
        self.failed = error.what
        self._publisher.leave(self.replica_id)
        self._recorder.event("lending_failed", replica_id=self.replica_id, why=error.what)
        self._recorder.finding(
            "lending_failed",
            f"the engine on the trainer's device failed, and nothing is lent any more: {error.what}",
            remedy=f"the run goes on without it; {error.remedy}",
        )
