"""Servers that speak OpenAI's HTTP interface: generation without weight updates, for evaluation, judges and teachers.

    OpenAIEngine   our engine protocol over /v1/completions: token ids in and out, one fixed weight version
    OpenAIClient   chat (a judge's text) and score (a teacher's logprobs of given tokens)

Every sampling parameter is sent, neutral values included, so that nothing comes from the server's model folder. Token
ids need two extensions that vLLM and servers like it have (`return_token_ids`, or token ids written into the logprobs);
a server that answers with text alone is an error. A server's logprobs are before or after temperature and filters as
it was started: where they are not ln p under temperature-scaled logits before top-k, top-p and min-p, the response
holds NaN, which no trainer accepts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from rollbook.envs.config import EndpointConfig
from rollbook.errors import ConfigError, DeadlineError, EngineDownError, EngineError
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.engine import EngineStats, GenerateRequest, PauseMode, Response
from rollbook.rollout.logprobs_mode import LogprobsMode, reports_ours
from rollbook.rollout.native.draws import sequence_key
from rollbook.types import FinishReason, Floats, Ids, VersionRun

RETRIED = (429, 502, 503, 504)
SEED_MASK = (1 << 31) - 1
"""Servers differ in how large a seed they take."""
TOKEN_ID_PREFIX = "token_id:"

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """What a judge said."""

    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_response_tokens: int


class OpenAIClient:
    """One server and one model of it. Requests carry their seed, so that repeating one after a failure is safe.

    Args:
        base_url: up to and including "/v1".
        api_key: sent as a bearer token; never shown.
        deadline_s: of one request, retries included.
        max_attempts: per request; connection failures and answers 429, 502, 503, 504 are repeated.
        retry_wait_s: before the second attempt, doubled for each further one; a server's Retry-After goes first.
        transport: for tests.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str = "",
        deadline_s: float = 600.0,
        max_attempts: int = 4,
        retry_wait_s: float = 0.5,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.model = model
        self._deadline_s = deadline_s
        self._max_attempts = max_attempts
        self._retry_wait_s = retry_wait_s
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(deadline_s, connect=min(10.0, deadline_s)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            transport=transport,
        )

    @classmethod
    def at(cls, endpoint: EndpointConfig) -> OpenAIClient:
        """Of a config.

        Raises:
            ConfigError: the token file cannot be read, or is empty.
        """
        return cls(
            endpoint.url,
            endpoint.model,
            api_key=_read_token(endpoint.token_file) if endpoint.token_file else "",
            deadline_s=endpoint.deadline_s,
            max_attempts=endpoint.max_attempts,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def max_context_tokens(self) -> int | None:
        """Longest sequence, where the server tells.

        Raises:
            EngineError: it does not answer, or does not have the model.
        """
        listed = _rows(await self._ask("GET", "/models"), "data")
        for row in listed:
            if row.get("id") == self.model:
                limit = row.get("max_model_len")
                return limit if isinstance(limit, int) else None
        names = ", ".join(repr(row.get("id")) for row in listed[:8])
        raise EngineError(f"{self.base_url} has no model {self.model!r}", f"it has {names or 'none at all'}")

    async def complete(self, body: Json) -> dict[str, Any]:
        """POST /completions; the answer's only choice, with "usage" beside its own fields."""
        answer = await self._ask(
            "POST", "/completions", {"model": self.model, "n": 1, "stream": False, **body}
        )
        choices = _rows(answer, "choices")
        if len(choices) != 1:
            raise EngineError(
                f"{self.base_url} gave {len(choices)} choices for one", "look at the server's log"
            )
        return {**choices[0], "usage": answer.get("usage") or {}}

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        max_response_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> ChatAnswer:
        """One answer to a conversation of {"role", "content"}; standard fields only, so any server will do."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_response_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed & SEED_MASK,
            "n": 1,
            "stream": False,
        }
        answer = await self._ask("POST", "/chat/completions", body)
        choices = _rows(answer, "choices")
        message = choices[0].get("message") if choices else None
        text = message.get("content") if isinstance(message, dict) else None
        if not isinstance(text, str):
            raise EngineError(f"{self.base_url} answered a chat without text", "look at the server's log")
        usage = answer.get("usage") or {}
        return ChatAnswer(
            text=text,
            finish_reason=str(choices[0].get("finish_reason")),
            num_prompt_tokens=int(usage.get("prompt_tokens") or 0),
            num_response_tokens=int(usage.get("completion_tokens") or 0),
        )

    async def score(self, token_ids: Ids) -> Floats:
        """[n] float32: ln p(token i | tokens before i) at temperature 1, NaN for the first. Needs vLLM's
        `prompt_logprobs`."""
        choice = await self.complete(
            {"prompt": token_ids.tolist(), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        )
        rows = choice.get("prompt_logprobs")
        if not isinstance(rows, list) or len(rows) != len(token_ids):
            raise EngineError(
                f"{self.base_url} gave no logprobs for the {len(token_ids)} tokens of a prompt",
                "a teacher must be a vLLM server (prompt_logprobs)",
            )
        scores = np.full(len(token_ids), np.nan, np.float32)
        for i, (token_id, row) in enumerate(zip(token_ids.tolist(), rows, strict=True)):
            entry = row.get(str(token_id)) if isinstance(row, dict) else None
            if isinstance(entry, dict):
                scores[i] = float(entry["logprob"])
            elif i:
                raise EngineError(
                    f"{self.base_url} gave no logprob for prompt token {i}", "look at its release"
                )
        return scores

    async def _ask(self, method: str, path: str, body: Json | None = None) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._attempt(method, path, body)
        except TimeoutError:
            raise DeadlineError(
                f"{self.base_url}{path} did not answer within {self._deadline_s:g} s",
                "raise its deadline, or look at the server's load",
            ) from None

    async def _attempt(self, method: str, path: str, body: Json | None) -> dict[str, Any]:
        failure, wait_s = "", 0.0
        for attempt in range(self._max_attempts):
            if attempt:
                await asyncio.sleep(wait_s)
            wait_s = self._retry_wait_s * 2**attempt
            try:
                answer = await self._http.request(method, self.base_url + path, json=body)
            except httpx.TimeoutException as error:
                failure = f"{type(error).__name__}"
                continue
            except httpx.TransportError as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code in RETRIED:
                failure = f"HTTP {answer.status_code}: {_message(answer)}"
                wait_s = _retry_after_s(answer) or wait_s
                continue
            if not answer.is_success:
                raise EngineError(
                    f"{self.base_url}{path} refused with HTTP {answer.status_code}: {_message(answer)}",
                    "the server's message says what it does not take",
                )
            try:
                content = answer.json()
            except ValueError:
                content = None
            if not isinstance(content, dict):
                raise EngineError(
                    f"{self.base_url}{path} answered without a JSON object",
                    "base_url must end with the API's /v1",
                )
            return content
        raise EngineDownError(
            f"{self.base_url}{path} failed {self._max_attempts} times, at last with {failure}",
            "see that the server runs and can be reached from here",
        )


class OpenAIEngine:
    """A server as one replica; implements `rollbook.rollout.engine.Engine` as far as HTTP allows.

    A remote server can't be stopped between two steps: pausing holds new requests back and waits for those that run
    (keep, drain) or gives them up (abort: they return no tokens). Its memory and its weights are its own.

    Args:
        client: the server; closed with this engine.
        weight_version: what every token is labeled with; the server's weights are taken not to change.
        logprobs_mode: how the server was started (`--logprobs-mode`; vLLM's default is raw).
        eos_token_ids: end a response, besides those the server knows.
    """

    def __init__(
        self,
        client: OpenAIClient,
        config: RolloutConfig,
        *,
        replica_id: int = 0,
        weight_version: int = 0,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.client = client
        self.config = config
        self.replica_id = replica_id
        self.weight_version_label = weight_version
        self.logprobs_mode = logprobs_mode
        self._eos_token_ids = eos_token_ids
        self._max_context_tokens: int | None = None
        self._slots = asyncio.Semaphore(config.num_slots)
        self._running: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._open: dict[str, None] = {}
        self._aborted: set[str] = set()
        self._is_paused = self._is_closed = False
        self._gate = asyncio.Event()
        """Set when whoever waits should look again; a pause puts a new one in its place."""
        self._gate.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._prefill_tokens = self._decode_tokens = 0
        self._busy_s, self._busy_since_s = 0.0, 0.0

    async def start(self) -> None:
        """See that the server answers and has the model."""
        self._max_context_tokens = await self.client.max_context_tokens()

    async def close(self) -> None:
        """Whoever waits for a response gets an EngineError."""
        self._is_closed = True
        self._gate.set()
        for task in list(self._running.values()):
            task.cancel()
        await self._idle.wait()
        await self.client.close()

    async def generate(self, request: GenerateRequest) -> Response:
        """Sample one response.

        Raises:
            EngineError: the server refuses, or gives no token ids.
            EngineDownError: it cannot be reached, or goes on failing.
            DeadlineError: it took longer than the client's deadline.
        """
        name = request.request_id
        if name in self._open:
            raise EngineError(f"request {name} is already running", "give every request an id of its own")
        self._open[name] = None
        try:
            async with asyncio.timeout(self.config.response_deadline_s):
                while True:
                    await self._gate.wait()
                    async with self._slots:
                        if name in self._aborted or self._is_closed:
                            return self._response(request, self._given_up(name))
                        if not self._is_paused:
                            return self._response(request, await self._run(request))
        except TimeoutError:
            raise DeadlineError(
                f"request {name} has no response after {self.config.response_deadline_s:g} s: replica "
                f"{self.replica_id} runs {len(self._running)} of {len(self._open)} open requests",
                "raise rollout.response_deadline_s, or look for a pause that was never resumed",
            ) from None
        finally:
            del self._open[name]
            self._aborted.discard(name)

    async def _run(self, request: GenerateRequest) -> dict[str, Any]:
        """The server's choice; empty when the request was aborted."""
        task = asyncio.ensure_future(self.client.complete(self._body(request)))
        if not self._running:
            self._busy_since_s = time.perf_counter()
        self._running[request.request_id] = task
        self._idle.clear()
        try:
            return await task
        except asyncio.CancelledError:
            if request.request_id in self._aborted or self._is_closed:
                return self._given_up(request.request_id)
            task.cancel()
            raise
        finally:
            del self._running[request.request_id]
            if not self._running:
                self._busy_s += time.perf_counter() - self._busy_since_s
                self._idle.set()

    def _given_up(self, name: str) -> dict[str, Any]:
        if self._is_closed:
            raise EngineDownError(
                f"the engine of replica {self.replica_id} was closed before {name} had a response",
                "start a new engine",
            )
        return {}

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        sampling, num_prompt = request.sampling, len(request.prompt_ids)
        limit = self._max_context_tokens
        if num_prompt == 0 or (limit is not None and num_prompt >= limit):
            raise EngineError(
                f"request {request.request_id}: the prompt has {num_prompt} tokens, the server's context is {limit}",
                "filter prompts by length",
            )
        room = sampling.max_response_tokens if limit is None else limit - num_prompt
        key = sequence_key(request.seed, request.group_id, request.member_idx)
        eos = () if sampling.ignore_eos else self._eos_token_ids
        is_greedy = sampling.temperature == 0  # filters don't change its token, but may its logprob
        return {
            "prompt": request.prompt_ids.tolist(),
            "max_tokens": min(sampling.max_response_tokens, room),
            "temperature": sampling.temperature,
            "top_p": 1.0 if is_greedy else sampling.top_p,
            "top_k": 0 if is_greedy else sampling.top_k,
            "min_p": 0.0 if is_greedy else sampling.min_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_tokens": 0,
            "seed": sequence_key(key, request.first_token_idx, 0) & SEED_MASK,
            "stop": list(sampling.stop_strings),
            "stop_token_ids": sorted({*sampling.stop_token_ids, *eos}),
            "ignore_eos": sampling.ignore_eos,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
        }

    def _response(self, request: GenerateRequest, choice: Json) -> Response:
        token_ids, logprobs = _tokens(choice, self.client.base_url) if choice else ([], [])
        if not reports_ours(self.logprobs_mode, request.sampling):
            logprobs = [float("nan")] * len(token_ids)
        reasons = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
        reason = reasons.get(str(choice.get("finish_reason"))) if choice else FinishReason.ABORTED
        if reason is None:
            raise EngineError(
                f"{self.client.base_url} ended request {request.request_id} with {choice.get('finish_reason')!r}",
                "look at the server's log",
            )
        cached = (choice.get("usage") or {}).get("prompt_tokens_details") or {}
        num_cached = int(cached.get("cached_tokens") or 0)
        if choice:
            self._prefill_tokens += len(request.prompt_ids) - num_cached
            self._decode_tokens += len(token_ids)
        runs = (VersionRun(self.weight_version_label, len(token_ids)),) if token_ids else ()
        return Response(
            request_id=request.request_id,
            response_ids=np.array(token_ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            version_runs=runs,
            finish_reason=reason,
            num_cached_prompt_tokens=num_cached,
            replica_id=self.replica_id,
        )

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Returns when nothing of ours runs on the server. keep and drain wait for it; abort gives it up."""
        self._is_paused = True
        gate, self._gate = self._gate, asyncio.Event()
        if mode == "abort":
            self._aborted.update(self._open)
            gate.set()
            for task in list(self._running.values()):
                task.cancel()
        await self._idle.wait()

    async def resume(self) -> None:
        self._is_paused = False
        self._gate.set()

    async def sleep(self, level: int = 1) -> None:
        raise EngineError(
            f"replica {self.replica_id} is the server {self.client.base_url}, whose memory is its own",
            'run the engine on this machine (rollout.engine = "vllm" or "native") to let it sleep',
        )

    async def wake(self) -> None:
        """Never asleep."""

    async def reset_prefix_cache(self) -> None:
        """The server's weights don't change, so what it cached stays right."""

    async def weight_version(self) -> int:
        return self.weight_version_label

    async def stats(self) -> EngineStats:
        """Of what was asked for through this engine; the server's slots and pool are not known."""
        busy_s = self._busy_s + (time.perf_counter() - self._busy_since_s if self._running else 0.0)
        return EngineStats(
            weight_version=self.weight_version_label,
            num_running=len(self._running),
            num_waiting=len(self._open) - len(self._running),
            num_slots=self.config.num_slots,
            kv_pool_tokens=0,
            kv_used_tokens=0,
            prefill_tokens=self._prefill_tokens,
            cached_prompt_tokens=0,
            decode_tokens=self._decode_tokens,
            decode_steps=0,
            num_preemptions=0,
            busy_s=busy_s,
            waiting_requests=tuple(list(self._open)[:32]),
        )


def _read_token(path: str) -> str:
    try:
        token = Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"token_file {path!r} cannot be read: {error}", "name a file that holds the key alone"
        ) from None
    if not token or not token.isascii() or len(token.split()) != 1:
        raise ConfigError(
            f"token_file {path!r} does not hold one key", "put the key into it, and nothing else"
        )
    return token


def _tokens(choice: Json, server: str) -> tuple[list[int], list[float]]:
    logprobs = choice.get("logprobs")
    entries = logprobs if isinstance(logprobs, dict) else {}
    values, names = entries.get("token_logprobs") or [], entries.get("tokens") or []
    token_ids = choice.get("token_ids")
    if token_ids is None and all(str(name).startswith(TOKEN_ID_PREFIX) for name in names):
        token_ids = [int(str(name).removeprefix(TOKEN_ID_PREFIX)) for name in names]
    if not isinstance(token_ids, list) or len(values) != len(token_ids):
        raise EngineError(
            f"{server} answered with text, not with token ids and a logprob for each",
            "use a server with return_token_ids (vLLM); text alone cannot be trained on or continued",
        )
    return [int(i) for i in token_ids], [float(value) for value in values]


def _rows(answer: Json, key: str) -> list[dict[str, Any]]:
    rows = answer.get(key)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _message(answer: httpx.Response) -> str:
    """The server's own words, shortened."""
    try:
        content = answer.json()
    except ValueError:
        return answer.text[:300]
    error = content.get("error", content) if isinstance(content, dict) else content
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]


def _retry_after_s(answer: httpx.Response) -> float | None:
    try:
        return float(answer.headers["retry-after"])
    except (KeyError, ValueError):
        return None
