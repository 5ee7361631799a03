"""What the ledger expects of each stage of a step, on this machine and for this config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollbook.ledger.entry import Entry

if TYPE_CHECKING:
    from rollbook.controller.loop import Controller


async def expectation(controller: Controller) -> Mapping[str, Entry]:
    return {}
