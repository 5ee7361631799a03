"""An OpenAI-compatible server on loopback, for judges, baselines and teachers: answers come from a function of
the question."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = str | int
"""Text, or an HTTP status to refuse with."""


class FakeServer:
    """What was asked, in order, and where."""

    def __init__(self, reply: Callable[[str], Answer]) -> None:
        self.reply = reply
        self.questions: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.url = ""

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "big", "max_model_len": 4096}]}
        assert body is not None
        self.questions.append(body)
        if path == "/v1/completions":
            return 200, {"choices": [{"prompt_logprobs": self._scored(body["prompt"])}]}
        assert path == "/v1/chat/completions"
        said = self.reply(body["messages"][-1]["content"])
        if isinstance(said, int):
            return said, {"error": {"message": "refused by the test"}}
        return 200, {
            "choices": [{"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 3},
        }

    @staticmethod
    def _scored(token_ids: list[int]) -> list[dict[str, dict[str, float]] | None]:
        """As vLLM's: every token is -0.5 - its id / 100."""
        return [None, *({str(i): {"logprob": -0.5 - i / 100}} for i in token_ids[1:])]


@contextmanager
def serving(reply: Callable[[str], Answer]) -> Iterator[FakeServer]:
    fake = FakeServer(reply)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: dict[str, Any] | None) -> None:
            fake.keys.add(self.headers.get("Authorization", ""))
            status, content = fake.answer(self.path, body)
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that hangs up is none."""

    with Server(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        fake.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
