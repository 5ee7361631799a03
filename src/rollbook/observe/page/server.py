"""The page over HTTP, on loopback: it re-reads the run directory when asked and holds nothing else."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from rollbook.errors import RunError
from rollbook.observe.clock import Clock, SystemClock
from rollbook.observe.history import RunHistory
from rollbook.observe.page import content

HOST = "127.0.0.1"
MAX_BUCKETS = 2000
MAX_REFRESH_S = 0.8
"""Spent per request on taking up a long run, so that each answer stays quick while it loads."""
REFRESH_BYTES = 2 << 20


def page_app(path: Path, clock: Clock | None = None) -> Starlette:
    """The web application over one run directory. Raises RunError when there is no run."""
    clock = clock or SystemClock()
    history = RunHistory(path)
    lock = threading.Lock()

    def page(request: Request) -> Response:
        return HTMLResponse(content.page_html())

    def overview(request: Request) -> Response:
        with lock:
            ends_at = clock.mono_s() + MAX_REFRESH_S
            while history.refresh(REFRESH_BYTES) and clock.mono_s() < ends_at:
                pass
            return JSONResponse(content.overview(history, clock.unix_s()))

    def series(request: Request) -> Response:
        query = request.query_params
        names = [name for name in query.get("names", "").split(",") if name]
        num_buckets = max(1, min(MAX_BUCKETS, _int(query.get("buckets")) or 400))
        with lock:
            return JSONResponse(
                content.series(
                    history,
                    names,
                    first=_int(query.get("first")),
                    last=_int(query.get("last")),
                    num_buckets=num_buckets,
                )
            )

    def step(request: Request) -> Response:
        with lock:
            return JSONResponse(content.step(history, request.path_params["step"]))

    def trajectories(request: Request) -> Response:
        with lock:
            return JSONResponse(content.trajectories(history, request.path_params["step"]))

    def trajectory(request: Request) -> Response:
        where = request.path_params
        with lock:
            found = content.trajectory(history, where["step"], f"{where['group']}/{where['member']}")
        return (
            JSONResponse(found) if found else JSONResponse({"error": "no such trajectory"}, status_code=404)
        )

    def meanings(request: Request) -> Response:
        with lock:
            return JSONResponse(content.meanings(history))

    def plan(request: Request) -> Response:
        return JSONResponse(content.waterfall_of_plan(path))

    async def user_error(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, status_code=422)

    return Starlette(
        routes=[
            Route("/", page),
            Route("/api/overview", overview),
            Route("/api/series", series),
            Route("/api/step/{step:int}", step),
            Route("/api/trajectories/{step:int}", trajectories),
            Route("/api/trajectory/{step:int}/{group:int}/{member:int}", trajectory),
            Route("/api/meanings", meanings),
            Route("/api/plan", plan),
        ],
        middleware=[
            # A page of another site must not read a run through a name that points here.
            Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost", "testserver"]),
            Middleware(GZipMiddleware, minimum_size=2048, compresslevel=1),
        ],
        exception_handlers={RunError: user_error},
    )


def open_socket(port: int) -> socket.socket:
    """A listening socket on loopback; port 0 takes any free one. Raises RunError when it is taken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise RunError(
            f"port {port} on {HOST} cannot be opened: {error.strerror}",
            "choose another with --port, or --port 0",
        ) from None
    return listener


def serve(app: Any, listener: socket.socket) -> None:
    """Serve until interrupted."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    server.run(sockets=[listener])


def _int(text: str | None) -> int | None:
    try:
        return int(text) if text else None
    except ValueError:
        return None
