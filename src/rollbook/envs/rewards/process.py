"""Scorer processes: one call at a time each, killed when a call outlives its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from rollbook.errors import ConfigError, RewardError

MAX_REPLY_BYTES = 1 << 22


class _Died(Exception):
    """The process ended instead of answering."""


class ScorerProcess:
    """One process. After a failed call it is dead and the next call starts another."""

    def __init__(
        self, functions: Sequence[str], *, start_deadline_s: float, folders: Sequence[str] = ()
    ) -> None:
        self._functions = list(functions)
        self._folders = list(folders)
        self._start_deadline_s = start_deadline_s
        self._process: Process | None = None

    async def start(self) -> None:
        """Start and import the functions.

        Raises:
            ConfigError: a function cannot be imported.
            RewardError: the process did not start in time.
        """
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollbook.envs.rewards.worker"),
            stdin=PIPE,
            stdout=PIPE,
            limit=MAX_REPLY_BYTES,
            start_new_session=True,  # Ctrl-C is for the run; it ends this process by closing its input
        )
        request: dict[str, JsonValue] = {
            "path": list(sys.path),
            "load": list(self._functions),
            "folders": list(self._folders),
        }
        try:
            async with asyncio.timeout(self._start_deadline_s):
                reply = await self._exchange(request)
        except (TimeoutError, _Died) as error:
            await self.kill()
            raise RewardError(
                f"a scorer process for {', '.join(self._functions)} did not start: "
                + (str(error) or f"no answer in {self._start_deadline_s:g} s"),
                "look at its messages above, or raise reward.start_deadline_s if its imports are slow",
            ) from None
        except BaseException:
            await self.kill()
            raise
        if "error" in reply:
            await self.kill()
            raise ConfigError(str(reply["error"]), str(reply.get("remedy", "mend the reward function")))

    async def call(
        self,
        function: str,
        response: str,
        task: Mapping[str, JsonValue],
        options: Mapping[str, JsonValue],
        *,
        deadline_s: float,
    ) -> dict[str, float]:
        """Scores as `checked_score` gives them.

        Raises:
            TimeoutError: the deadline passed; the process was killed.
            RewardError: the function raised, or the process died.
        """
        if self._process is None:
            await self.start()
        request: dict[str, JsonValue] = {
            "function": function,
            "response": response,
            "task": dict(task),
            "options": dict(options),
        }
        try:
            async with asyncio.timeout(deadline_s):
                reply = await self._exchange(request)
        except _Died as error:
            await self.kill()
            raise RewardError(f"the scorer process died: {error}", "see its messages on stderr") from None
        except BaseException:  # a time-out or a cancellation: its late answer must not meet the next question
            await self.kill()
            raise
        if "error" in reply:
            raise RewardError(str(reply["error"]), "mend the reward function, or the row it was given")
        scores = reply["scores"]
        assert isinstance(scores, dict)
        return {str(name): float(str(value)) for name, value in scores.items()}

    async def kill(self) -> None:
        """End the process, whatever it does, and what it has started; safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:  # else its number may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its session is its own
        await process.wait()

    async def _exchange(self, request: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError, ValueError) as error:
            raise _Died(f"{type(error).__name__}: {error}") from None
        if not line.endswith(b"\n"):
            code = await process.wait()
            raise _Died(f"signal {-code}" if code < 0 else f"exit code {code}")
        reply: dict[str, JsonValue] = json.loads(line)
        return reply


class ProcessPool:
    """A fixed number of scorer processes; a call waits for a free one."""

    def __init__(
        self,
        functions: Sequence[str],
        *,
        num_workers: int,
        start_deadline_s: float,
        folders: Sequence[str] = (),
    ) -> None:
        self._all = [
            ScorerProcess(functions, start_deadline_s=start_deadline_s, folders=folders)
            for _ in range(num_workers)
        ]
        self._free: asyncio.LifoQueue[ScorerProcess] = asyncio.LifoQueue()

    async def start(self) -> None:
        """Start one process, to find mistakes; the others start when they are needed."""
        await self._all[-1].start()
        for process in self._all:
            self._free.put_nowait(process)

    async def call(
        self,
        function: str,
        response: str,
        task: Mapping[str, JsonValue],
        options: Mapping[str, JsonValue],
        *,
        deadline_s: float,
    ) -> dict[str, float]:
        process = await self._free.get()
        try:
            return await process.call(function, response, task, options, deadline_s=deadline_s)
        finally:
            self._free.put_nowait(process)

    async def close(self) -> None:
        for process in self._all:
            await process.kill()
