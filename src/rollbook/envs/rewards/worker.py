"""A scorer process: `python -m rollbook.envs.rewards.worker`.

One JSON object a line. In: {"path": [...], "load": [names], "folders": [...]} once, then {"function", "response",
"task", "options"}. Out, a line each: {"scores": {...}} or {"error": "..."}. Functions run in the main thread, so that
their signals work; what they print goes to stderr. The process ends when its input does, even in the middle of a call.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

from rollbook.envs.rewards.functions import find_function, prepare
from rollbook.envs.rewards.result import checked_score
from rollbook.errors import ConfigError

MAX_ERROR_CHARS = 2000


def _read(requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin.buffer:
        requests.put(json.loads(line))
    # The parent is gone; the main thread may hang in a scorer, or wait for a process that the scorer has started.
    if os.getsid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _load(request: dict[str, Any]) -> dict[str, Any]:
    sys.path[:] = request["path"]
    for name in request["load"]:  # libraries too, however long that takes: a call's deadline is for the call
        if inspect.iscoroutinefunction(find_function(name, request["folders"])):
            importlib.import_module("asyncio")
        prepare(name)
    return {"scores": {}}


def _score(request: dict[str, Any]) -> dict[str, Any]:
    function = find_function(request["function"])
    returned = function(request["response"], request["task"], **request["options"])
    if inspect.isawaitable(returned):
        import asyncio  # half of the start-up time, and few scorers need it

        returned = asyncio.run(_awaited(returned))
    return {"scores": checked_score(returned)}


async def _awaited(awaitable: Any) -> object:
    result: object = await awaitable
    return result


def _answer(handle: Callable[[dict[str, Any]], dict[str, Any]], request: dict[str, Any]) -> dict[str, Any]:
    try:
        return handle(request)
    except ConfigError as error:
        return {"error": error.what, "remedy": error.remedy}
    except (Exception, SystemExit) as error:  # whatever a scorer raises is its answer, also sys.exit()
        return {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]}


def serve(replies: TextIO) -> None:
    """Answer requests until the input ends."""
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    handle = _load
    while True:
        replies.write(json.dumps(_answer(handle, requests.get())) + "\n")
        replies.flush()
        handle = _score


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a scorer that prints must not speak into the replies
    serve(channel)
