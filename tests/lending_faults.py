"""Timings of a lending, chosen instead of waited for."""

from __future__ import annotations

import asyncio

from rollbook.controller.lending import Lending
from rollbook.controller.loop import Controller


class HoldsUntilLent:
    """The replica stands still while the lent one is brought up, and until that has sampled some tokens."""

    def __init__(self, num_tokens: int = 10) -> None:
        self.num_tokens = num_tokens
        self.num_lendings = 0

    def __call__(self, controller: Controller) -> None:
        lending, (own,) = the(controller), controller.router.engines
        plain = lending._serve

        async def serve() -> None:
            try:
                await own.pause("keep")  # inside: a lending that is cut short here has paused it already
                await plain()
                self.num_lendings += not lending.failed
                then = (await lending.engine.stats()).decode_tokens
                while lending.engine._thread.end is None and (await lending.engine.stats()).num_running:
                    await asyncio.sleep(0)
                    if (await lending.engine.stats()).decode_tokens >= then + self.num_tokens:
                        break
            finally:
                await own.resume()

        lending._serve = serve  # type: ignore[method-assign]


def the(controller: Controller) -> Lending:
    assert controller.lending is not None
    return controller.lending
