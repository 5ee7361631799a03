"""Generation on the trainer's device while the trainer waits for its groups.

    begin    bring up and put away twice: what a lending costs, and that it works
    a wait   long enough?  (expected wait - seconds to bring up) x share of the tokens exceeds the cost
             its turn?     `lending_trial.py`: waits with it and without it, whichever was measured to be faster
             bring up      wake the engine, re-sync it (the same proven transaction), probe it
             serve         it joins the router; the replicas give back what is more than their share
    groups   put away      it leaves the router; what it has not finished goes on elsewhere from its own tokens;
    are there              keys, values and weights of its own are dropped
             account       saved = all tokens of the wait / pace of the waits without it - its seconds; less than 0
                           where the engines slow each other by more than there are more of them

One more native engine, asleep between lendings. It serves the newest published version or nothing, so that labels, the
staleness bound and the account of groups are those of any replica. What fails leaves the run as it was without it: said
once, and nothing is lent any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from rollbook.controller.config import LendingSection
from rollbook.controller.lending_trial import LendingTrial, Verdict
from rollbook.controller.replicas import Replica
from rollbook.errors import DeadlineError, RunError, SyncError
from rollbook.observe.recorder import Recorder
from rollbook.observe.values import Last, Total, Values
from rollbook.rollout.engine import Engine
from rollbook.rollout.native.engine import NativeEngine
from rollbook.rollout.router import Router
from rollbook.sync.publisher import Publisher

Result = TypeVar("Result")

SHARE_WEIGHT = 0.3
"""Of the newest lending in the running mean of its share of the tokens."""


@dataclass(slots=True, kw_only=True)
class _Served:
    """One lending that is over."""

    lent_s: float
    back_s: float
    num_returned: int
    is_late: bool
    """It was ended while the trainer still waited: waits without it were never as long."""


class Lending:
    """The lent engine of a run, and the decision when it serves. Called from the event loop, between two stages.

    Args:
        replica: the lent engine, awake, and the port of its weights. It belongs to no router and no publisher yet.
        probe: why an engine does not give the trainer's logprobs, or nothing.
        deadline_s: longest wait for the engine to wake, resume, pause or sleep.
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
        deadline_s: float,
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
        self.trial = LendingTrial()
        """Whether it pays, as measured."""
        self.failed = ""
        """Why nothing is lent any more."""
        self.num_tokens = 0
        """Sampled by it since `pop_tokens`."""
        self._port = replica.port
        self._router, self._publisher = router, publisher
        self._probe, self._recorder, self._clock = probe, recorder, clock
        self._deadline_s = deadline_s
        self._own: Sequence[Engine] = list(router.engines)
        self._said: bool | None = None
        """Whether it pays, as was said last."""
        self._serving_at_s: float | None = None
        self._tokens_then = (0, 0)
        """Decoded by it and by the other replicas when it began to serve."""

    async def rehearse(self) -> None:
        """Bring it up and put it away, before the first step: what that costs, the second time.

        Raises:
            RunError: it cannot be done.
        """
        await self._answered("sleep", self.engine.sleep(2))
        for _ in range(2):
            began_at_s = self._clock()
            await self._bring_up()
            self.up_s = self._clock() - began_at_s
            await self._put_away()
            self.back_s = self._clock() - began_at_s - self.up_s

    def may_pay(self) -> bool:
        """Whether the next wait is long enough for a lending, engines taken for independent: else none is tried."""
        saved_s = max(self.expected_wait_s - self.up_s, 0.0) * self.share
        return not self.failed and saved_s >= self.config.margin * (self.up_s + self.back_s)

    async def during(self, wait: Awaitable[Result], *, is_published: bool) -> Result:
        """Await `wait`; meanwhile the engine serves if that pays, or to see whether it does.

        Args:
            is_published: the trainer's weights are those of the newest publication. Others are lent nothing.
        """
        began_at_s, then = self._clock(), await self._num_decoded()
        is_possible = is_published and self.may_pay()
        is_tried = is_possible and self.config.margin > 0
        lends = is_possible and (not is_tried or self.trial.lends_next)
        waiting = asyncio.ensure_future(wait)
        serving = asyncio.create_task(self._serve()) if lends else None
        served: _Served | None = None
        try:
            if serving is not None and is_tried:
                await asyncio.wait({waiting}, timeout=self.trial.longest_s)
                if not waiting.done():
                    served, serving = await self._take_back(serving, is_late=True), None
            return await waiting
        finally:
            if not waiting.done():  # this one was cancelled
                waiting.cancel()
                await asyncio.wait({waiting})
            if serving is not None:
                served = await self._take_back(serving, is_late=False)
            seconds, now = self._clock() - began_at_s, await self._num_decoded()
            num_tokens = sum(now) - sum(then)
            saved_s = self._saved_s(num_tokens, seconds) if lends else 0.0
            self.expected_wait_s = max(seconds + (saved_s or 0.0), 0.0)
            if served is not None:
                self._record(served, saved_s)
            if is_tried and not self.failed:
                self._judge(self.trial.note(num_tokens=num_tokens, seconds=seconds))

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
        await self._answered("wake", self.engine.wake())
        self._publisher.join(self._port)
        await self._publisher.resync(self.replica_id)
        await self._answered("resume", self.engine.resume())
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

    async def _take_back(self, serving: asyncio.Task[None], *, is_late: bool) -> _Served | None:
        """The trainer needs its device, however far the lending is; None where it was not up yet."""
        began_at_s = self._clock()
        serving.cancel()
        await asyncio.wait({serving})  # whose cancellation is not this one's
        if not serving.cancelled():
            serving.result()
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
        serving_at_s, self._serving_at_s = self._serving_at_s, None
        if serving_at_s is None:
            if not self.failed:
                self._recorder.event("lending_cut_short", replica_id=self.replica_id, back_s=self.back_s)
            self._recorder.metrics({"lending/cost_s": Total(self.back_s)})
            return None
        self._count_tokens(await self._num_decoded())
        lent_s = began_at_s - serving_at_s
        return _Served(lent_s=lent_s, back_s=self.back_s, num_returned=num_returned, is_late=is_late)

    def _record(self, served: _Served, saved_s: float | None) -> None:
        self._recorder.event(
            "taken_back",
            replica_id=self.replica_id,
            saved_s=saved_s,
            num_tokens=self.num_tokens,
            **asdict(served),
        )
        values: Values = {
            "lending/lent_s": Total(served.lent_s),
            "lending/cost_s": Total(self.up_s + served.back_s),
            "lending/num_tokens": Total(self.num_tokens),
            "lending/num_returned": Total(served.num_returned),
            "lending/token_share": Last(self.share),
        }
        if saved_s is not None:
            values["lending/saved_s"] = Total(saved_s)
        self._recorder.metrics(values)

    def _judge(self, verdict: Verdict | None) -> None:
        """Put on record what a comparison found; what is new is also said."""
        if verdict is None:
            return
        self._recorder.event("lending_judged", **asdict(verdict))
        self._recorder.metrics(
            {
                "lending/lent_tokens_per_s": Last(verdict.lent_tokens_per_s),
                "lending/alone_tokens_per_s": Last(verdict.alone_tokens_per_s),
            }
        )
        if verdict.pays == self._said:
            return
        self._said = verdict.pays
        measured = (
            f"engines sampled {verdict.lent_tokens_per_s:,.0f} tokens/s in waits with it ({verdict.num_lent}) and "
            f"{verdict.alone_tokens_per_s:,.0f} in waits without it ({verdict.num_alone})"
        )
        if verdict.pays:
            self._recorder.event(
                "lending_pays", says=f"the trainer's device is lent while it waits: {measured}"
            )
            return
        self._recorder.finding(
            "lending_does_not_pay",
            f"lending the trainer's device does not make the run faster: {measured}. It is tried again after "
            f"{verdict.num_waits_held} waits",
            remedy="engines of one host take each other's cores and interpreter, and few sequences are no faster on "
            "two engines: leave lending.is_on out, or train and sample on devices of their own",
        )

    async def _put_away(self) -> None:
        self._publisher.leave(self.replica_id)
        await self._answered("pause", self.engine.pause("abort"))
        await self._answered("sleep", self.engine.sleep(2))

    async def _answered(self, what: str, call: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                await call
        except TimeoutError:
            raise DeadlineError(
                f"the lent engine, replica {self.replica_id}, was asked to {what} and did not within "
                f"{self._deadline_s:g} s",
                "a step of it does not end; memory.move_deadline_s is how long it may take",
            ) from None

    def _count_tokens(self, now: tuple[int, int]) -> None:
        """Of the time in which it served."""
        lent, own = (count - then for count, then in zip(now, self._tokens_then, strict=True))
        self.num_tokens += lent
        if lent + own:
            self.share += SHARE_WEIGHT * (lent / (lent + own) - self.share)

    def _saved_s(self, num_tokens: int, seconds: float) -> float | None:
        """What the wait would have taken without it, less what it took; None where no wait without it was measured."""
        pace = self.trial.tokens_per_s(lent=False)
        return num_tokens / pace - seconds if pace else None

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
