"""Where the time of a publication goes, bucket by bucket: host clocks of both processes and CUDA events on one axis.

    python bench/gpu/sync_timeline.py                                   # 8B, ipc and nccl, 3 x 256 MiB, two GPUs
    python bench/gpu/sync_timeline.py --tiny                            # the same on a CPU: shm and gloo, seconds

The real parts of `bench/sync.py`, with a clock reading before and after each stage of a bucket's way. Both processes
read the monotonic clock of one host, so their stages stand on one axis. A stage's row is its median and 90th percentile
over the buckets of one warmed-up publication; "period" is the time between two buckets at the same place, and the stage
whose own time comes close to the period is the one to mend. GPU rows are CUDA events around the copies of a bucket.
Where the sender waits for a slot most of the time, the link or the replica is the bound, not the sender.

Expected (H200, 8B, 256 MiB, link 385 GB/s: 0.70 ms a bucket). Buckets that went through the event loops of both sides
had a period of 1.42 ms by ipc and 1.74 ms by NCCL, in changes of thread. Now the export thread sends, one thread of the
replica takes in and one answers, and a bucket is announced as soon as its copies are queued. On a CPU that takes
0.18 ms a bucket on each side instead of 0.46; with launches of copies and digests 0.4 ms, which the copies hide:
  ipc to the other GPU   period 0.75 ms, stream 48 ms (0.87 of the link) with 3 slots, 0.80 with 2
  nccl                   period 0.80 ms, stream 52 ms (0.9 of 340 GB/s)
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch

import sync as bench  # bench/sync.py
from rollbook.sync import remote
from rollbook.sync.bucket import DigestLedger, Packer
from rollbook.sync.inproc import InprocPort
from rollbook.sync.publisher import Publisher
from rollbook.sync.transaction import ReplicaTransaction

TRACE_FLAG = "--traced-replica"
Row = tuple[str, int, float, float]
"""(stage, bucket, began, ended), seconds of the monotonic clock."""


class Trace:
    """Clock readings of this process."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.gpu: list[tuple[str, int, torch.cuda.Event, torch.cuda.Event]] = []

    def add(self, stage: str, bucket_idx: int, began_s: float) -> None:
        self.rows.append((stage, bucket_idx, began_s, time.perf_counter()))

    def around(self, owner: Any, name: str, stage: str, idx_of: Callable[..., int]) -> None:
        """Time every call of a method; `idx_of` tells the bucket from the arguments."""
        inner = getattr(owner, name)
        if asyncio.iscoroutinefunction(inner):

            @functools.wraps(inner)
            async def timed(*args: Any, **keywords: Any) -> Any:
                began_s = time.perf_counter()
                try:
                    return await inner(*args, **keywords)
                finally:
                    self.add(stage, idx_of(*args), began_s)
        else:

            @functools.wraps(inner)
            def timed(*args: Any, **keywords: Any) -> Any:
                began_s = time.perf_counter()
                try:
                    return inner(*args, **keywords)
                finally:
                    self.add(stage, idx_of(*args), began_s)

        setattr(owner, name, timed)

    def events(self, owner: Any, name: str, stage: str, idx_of: Callable[..., int]) -> None:
        """CUDA events before and after what a method queues on its stream."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args: Any, **keywords: Any) -> Any:
            if not torch.cuda.is_available():
                return inner(*args, **keywords)
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            try:
                return inner(*args, **keywords)
            finally:
                after.record()
                self.gpu.append((stage, idx_of(*args), before, after))

        setattr(owner, name, timed)

    def take(self) -> dict[str, list[list[Any]]]:
        """Everything since the last time, as JSON values."""
        rows = [list(row) for row in self.rows]
        gpu = []
        for stage, idx, before, after in self.gpu:
            after.synchronize()
            gpu.append([stage, idx, before.elapsed_time(after)])
        self.rows.clear()
        self.gpu.clear()
        return {"rows": rows, "gpu_ms": gpu}


TRACE = Trace()


def trace_sender() -> None:
    packing = [-1]
    inner = Packer.buckets

    def buckets(self: Packer) -> Any:
        stream = inner(self)
        for idx in itertools.count():
            packing[0] = idx
            began_s = time.perf_counter()
            bucket = next(stream, None)
            if bucket is None:
                return
            TRACE.add("sender: pack", idx, began_s)
            yield bucket

    Packer.buckets = buckets  # type: ignore[method-assign]
    TRACE.around(DigestLedger, "flush", "sender: launch digests", lambda *_: packing[0])
    TRACE.around(remote.RemotePort, "_begin", "sender: message out", lambda self, bucket: bucket.bucket_idx)
    arrived = [-1]
    arrive = Publisher._arrive

    def wait(self: Publisher, publication: Any, *rest: Any) -> None:
        arrived[0] = arrived[0] + 1 if publication.num_buckets > self.config.max_buckets else 0
        began_s = time.perf_counter()
        arrive(self, publication, *rest)
        TRACE.add("sender: wait for a slot", arrived[0], began_s)

    Publisher._arrive = wait  # type: ignore[method-assign]


def trace_replica() -> None:
    TRACE.around(
        remote.ReplicaServer,
        "_receive",
        "replica: take, begin",
        lambda self, frame, channel: _idx(frame.header),
    )
    TRACE.around(
        ReplicaTransaction,
        "begin_receive",
        "replica: queue copy and digests",
        lambda self, bucket: bucket.bucket_idx,
    )
    TRACE.events(
        ReplicaTransaction, "_take_in", "GPU: copy out of the bucket", lambda self, b, _: b.bucket_idx
    )
    TRACE.around(
        ReplicaTransaction,
        "_start_digests",
        "replica: of it launch digests",
        lambda self: self._next_bucket_idx,
    )


def _idx(header: dict[str, Any]) -> int:
    idx = header.get("bucket_idx")
    return idx if isinstance(idx, int) else -1


class Stages:
    """What both processes saw in one publication."""

    def __init__(self, here: dict[str, list[list[Any]]], there: dict[str, list[list[Any]]]) -> None:
        self.rows = [row for row in here["rows"] + there["rows"] if row[1] >= 0]
        self.gpu = [row for row in here["gpu_ms"] + there["gpu_ms"] if row[1] >= 0]

    def print(self, link: float, num_bytes: int, shown: int) -> None:
        stages = list(dict.fromkeys(row[0] for row in self.rows))
        print(f"  {'stage':42s} {'median ms':>9s} {'p90 ms':>8s} {'period ms':>9s} {'sum ms':>8s}")
        for stage in stages:
            mine = sorted((row for row in self.rows if row[0] == stage), key=lambda row: row[2])
            took = sorted(1e3 * (row[3] - row[2]) for row in mine)
            ends = [row[3] for row in mine]
            gaps = sorted(1e3 * (b - a) for a, b in itertools.pairwise(ends)) or [float("nan")]
            print(
                f"  {stage:42s} {_at(took, 0.5):9.3f} {_at(took, 0.9):8.3f} {_at(gaps, 0.5):9.3f} {sum(took):8.1f}"
            )
        for stage in dict.fromkeys(row[0] for row in self.gpu):
            took = sorted(row[2] for row in self.gpu if row[0] == stage)
            print(f"  {stage:42s} {_at(took, 0.5):9.3f} {_at(took, 0.9):8.3f} {'':9s} {sum(took):8.1f}")
        num = max((row[1] for row in self.rows), default=0) + 1
        print(f"  the link alone: {num_bytes / num / link / 1e6:.3f} ms a bucket of {num}")
        first = num // 2
        chosen = sorted(row for row in self.rows if first <= row[1] < first + shown)
        if chosen:
            began_s = min(row[2] for row in chosen)
            print(f"  buckets {first} to {first + shown - 1}, ms from the first of it:")
            for stage, idx, start, end in sorted(chosen, key=lambda row: row[2]):
                print(
                    f"    {1e3 * (start - began_s):8.3f} {1e3 * (end - began_s):8.3f}  bucket {idx}  {stage}"
                )


def _at(values: list[float], frac: float) -> float:
    return values[min(len(values) - 1, int(frac * len(values)))]


async def traced_replica(args: dict[str, Any]) -> None:
    """The replica of `bench/sync.py`, which writes its readings into a file after each commit."""
    trace_replica()
    inner = InprocPort.commit

    async def commit(self: InprocPort) -> Any:
        report = await inner(self)
        aside = Path(args["folder"]) / "trace.tmp"
        aside.write_text(json.dumps(TRACE.take()))
        aside.rename(Path(args["folder"]) / "trace.json")
        return report

    InprocPort.commit = commit  # type: ignore[method-assign]
    await bench.replica_main(args)


async def timeline(model: str, transport: str, mib: float, max_buckets: int, shown: int) -> None:
    num_gpus = torch.cuda.device_count()
    device = torch.device("cuda:0" if num_gpus else "cpu")
    target = torch.device(f"cuda:{num_gpus - 1}" if num_gpus else "cpu")
    settings = bench.Settings(int(mib * bench.MIB), max_buckets)
    source = bench.Source(bench.random_weights(model, device))
    if transport == "ipc":
        link = bench.peer_link(device, target, settings.bucket_bytes)
    else:
        link = bench.host_link(device, settings.bucket_bytes)
    folders: list[str] = []
    start = bench.replica_process

    def traced(
        model: str, device: torch.device, transport: str, bucket_bytes: int, folder: str, **more: Any
    ) -> Any:
        folders.append(folder)
        return start(model, device, transport, bucket_bytes, folder, **more)

    async def body(publisher: Publisher, measured_link: float) -> None:
        used = link if transport in ("ipc", "shm") else measured_link
        for version in range(1, 5):
            TRACE.take()
            report = await publisher.publish(version)
            source.move()
            there = json.loads((Path(folders[-1]) / "trace.json").read_text())
        stages = Stages(TRACE.take(), there)
        share = report.num_bytes / report.stream_s / 1e9 / used
        print(
            f"\n{transport} to {target}, {model}B, {max_buckets} x {mib:g} MiB: stream {report.stream_s * 1e3:.1f} ms "
            f"({share:.2f} of {used:.0f} GB/s), whole {report.total_s * 1e3:.1f} ms, {report.num_buckets} buckets; "
            f"open {report.open_s * 1e3:.1f}, prove {report.prove_s * 1e3:.1f}, commit {report.commit_s * 1e3:.1f}"
        )
        stages.print(used, report.num_bytes, shown)

    bench.replica_process = traced
    bench.REPLICA_COMMAND = [sys.executable, __file__, TRACE_FLAG]
    try:
        await bench.between_processes(
            model, source, transport, target, settings, link, "", bench.Table(), 1, body
        )
    finally:
        bench.replica_process = start


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="8", choices=list(bench.MODELS))
    parser.add_argument("--transports", nargs="*", default=None)
    parser.add_argument("--bucket-mib", type=float, nargs="*", default=[256])
    parser.add_argument("--max-buckets", type=int, nargs="*", default=[3])
    parser.add_argument("--shown", type=int, default=4, help="buckets whose stages are listed one by one")
    parser.add_argument(
        "--tiny", action="store_true", help="a small model and small buckets, on whatever is there"
    )
    parser.add_argument(TRACE_FLAG, dest="replica", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.replica:
        await traced_replica(json.loads(args.replica))
        return
    trace_sender()
    is_cuda = torch.cuda.is_available()
    transports = args.transports or (["ipc", "nccl"] if is_cuda else ["shm", "gloo"])
    model, sizes = ("0.05", [1.0]) if args.tiny else (args.model, args.bucket_mib)
    for transport in transports:
        for mib in sizes:
            for max_buckets in args.max_buckets:
                await timeline(model, transport, mib, max_buckets, args.shown)


if __name__ == "__main__":
    asyncio.run(main())
    sys.stdout.flush()
    os._exit(0)  # process groups may wait for a peer that is gone
