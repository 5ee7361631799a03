"""Speed of weight publications: bytes, seconds and GB/s against the link measured in the same run.

    python bench/sync.py                       # what this machine has: CPU, or one GPU, or two
    python bench/sync.py --models 0.5 8 --parts digest ipc nccl --reps 3

Everything goes through the real parts: `Publisher`, transaction, digests, transports. Models are random bfloat16
weights in the shapes of Qwen2.5-0.5B, Qwen3-1.7B and Llama-3-8B. "stream" is from the first export to the last
bucket's arrival, "whole" adds open, prove and commit (swap, proof of the live weights). A link is what a plain copy
loop over buffers of the bucket's size reaches between the same two memories, in the same run.

Predictions, written before the first run on the machine (H200, 8B = 16.1 GB, buckets of 256 MiB). From measured
links: device copy 4.27 TB/s read and written, peer copy 395 GB/s, pinned host 55 GB/s each way.

    digest      one read of the weights at 3.6 TB/s and 1 ms of launches: 5.5 ms
    shared      engine computes with the trainer's memory: three reads, 5 ms each, 12 ms of Python: 27 ms
    inproc      two copies of the weights in one process: three reads, and a swap that moves the old bytes too
                (four passes, 15 ms): 27 + 15 + 10 ms of small calls = 52 ms, 310 GB/s
    ipc 1 GPU   pack and unpack 15 ms of copies, 62 messages at 0.4 ms: 40 ms stream; whole 85 ms, 190 GB/s
    ipc 2 GPUs  41 ms at the link; stream 46 ms (0.9 of the link), whole 85 ms
    nccl        broadcast at about 350 GB/s: stream 52 ms (0.9), whole 90 ms
    host        pinned shared memory, both directions at once: stream 310 ms (0.94), whole 345 ms
    delta       2 % changed: compare 3 passes 12 ms, 0.96 GB sent, gather and scatter about 40 ms: 100 ms over NVLink
                (no gain), 130 ms over the host link (2.7 times faster than full)
  Second round, after the first run (8B: digest 6.5 ms, shared 134 / 154, inproc 144 / 175, ipc to the other GPU
  229 / 272, nccl 264 / 299, host 510 / 547 ms stream / whole). Per bucket the replica built the table of all 291
  tensors anew (3 ms), each digest was a launch of its own that waited for all copies before it, fetching a bucket and
  taking it in excluded each other. Now: one table, a launch for every 64 MiB whose plan is copied from page-locked
  memory, one copy per bucket at the replica, and each bucket's copy queued behind the last one's.
    digest      tiles of 256 x 4, 2 warps, no views: 6.1 ms
    shared      62 buckets at 0.35 ms of Python, one launch at the replica: stream 25 ms, whole 45 ms
    inproc      the same, and the swap: stream 27 ms, whole 65 ms
    ipc 1 GPU   62 round trips hidden but for 0.6 ms of Python each: stream 40 ms, whole 75 ms
    ipc 2 GPUs  3 buckets of 256 MiB in flight: stream 50 ms (0.83 of the link), whole 85 ms; with 2: 65 ms (0.64)
    nccl        3 buckets: stream 56 ms (0.85), whole 90 ms; with 2: 70 ms (0.68)
    host        stream 325 ms (0.90), whole 360 ms, with 2 or 3
    bare        the same publications with digests left out: stream 2 ms shorter over NVLink, nothing over the host link
  Measured: host as predicted (336 / 371), ipc to the other GPU 88 / 121 at 256 MiB and 60 / 95 at 512 MiB (0.48 and
  0.69 of the link), nccl 108 / 144 at 256 MiB, shared 52 / 70, inproc 56 / 88. Over NVLink what is left is 1.4 ms
  for each bucket's message, answer and changes of thread, not bytes: halving the number of buckets halves it.
  Third round: bench/gpu/sync_timeline.py. Buckets go from the export thread to a reader thread of the replica, and are
  announced before their copies end: ipc to the other GPU 48 ms (0.87), nccl 52 ms (0.9). Measured 52 (0.81), 61 (0.77).
    CPU shm     digests dominate: three reads at about 5 GB/s a thread beside a copy at 20 GB/s: 1.2 GB/s a thread
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor

from rollbook.sync import bucket as bucket_module
from rollbook.sync import digest as digest_module
from rollbook.sync.broadcast import BroadcastGroup, BroadcastReceiver, BroadcastSender
from rollbook.sync.digest import PendingDigests, digests
from rollbook.sync.inproc import InprocPort
from rollbook.sync.ipc import IpcReceiver, IpcSender
from rollbook.sync.layout import MappedWeights, Place
from rollbook.sync.publisher import Publisher
from rollbook.sync.remote import RemotePort, ReplicaServer
from rollbook.sync.report import PublicationReport
from rollbook.sync.shm import ShmReceiver, ShmSender
from rollbook.sync.transport import Receiver, Sender
from rollbook.weights import TensorSpec, WeightPort

MIB = 1 << 20
Work = Coroutine[Any, Any, None]
REPLICA_COMMAND = [sys.executable, __file__, "--replica"]
"""How the other process is started; its arguments follow."""
# hidden, layers, feed-forward, query and key-value width, vocabulary, tied head
MODELS = {
    "0.05": (512, 8, 1536, 512, 128, 32000, True),
    "0.5": (896, 24, 4864, 896, 128, 151936, True),
    "1.7": (2048, 28, 6144, 2048, 1024, 151936, True),
    "8": (4096, 32, 14336, 4096, 1024, 128256, False),
}


def model_shapes(name: str) -> dict[str, tuple[int, ...]]:
    hidden, layers, ffn, q, kv, vocab, is_tied = MODELS[name]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes[at + "input_layernorm.weight"] = (hidden,)
        shapes[at + "self_attn.q_proj.weight"] = (q, hidden)
        shapes[at + "self_attn.k_proj.weight"] = (kv, hidden)
        shapes[at + "self_attn.v_proj.weight"] = (kv, hidden)
        shapes[at + "self_attn.o_proj.weight"] = (hidden, q)
        shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        shapes[at + "mlp.gate_proj.weight"] = (ffn, hidden)
        shapes[at + "mlp.up_proj.weight"] = (ffn, hidden)
        shapes[at + "mlp.down_proj.weight"] = (hidden, ffn)
    shapes["model.norm.weight"] = (hidden,)
    if not is_tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def random_weights(name: str, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator(device=device).manual_seed(0)
    weights = {}
    for tensor_name, shape in model_shapes(name).items():
        bits = torch.empty(shape, dtype=torch.int16, device=device)
        weights[tensor_name] = bits.random_(0x3A00, 0x3E00, generator=generator).view(torch.bfloat16)
    return weights


def zero_engine(name: str, device: torch.device, replica_id: int = 0) -> BenchEngine:
    live = {n: torch.zeros(s, dtype=torch.bfloat16, device=device) for n, s in model_shapes(name).items()}
    return engine_over(live, replica_id)


def engine_over(live: dict[str, Tensor], replica_id: int = 0) -> BenchEngine:
    return BenchEngine(
        MappedWeights(live, {n: Place(parameter=n, shape=tuple(t.shape)) for n, t in live.items()}),
        replica_id,
    )


class BenchEngine:
    """An engine that never decodes: `SwapEngine` on one thread."""

    def __init__(self, live: MappedWeights, replica_id: int) -> None:
        self.live, self.replica_id, self.version = live, replica_id, 0
        self._thread = ThreadPoolExecutor(1)

    async def _ask(self, fn: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, fn)

    async def pause(self, mode: Literal["keep", "abort"] = "keep") -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self, level: int = 1) -> None: ...

    async def wake(self) -> None: ...

    async def run_between_steps(self, fn: Callable[[], Any]) -> Any:
        return await self._ask(fn)

    async def adopt_version(self, weight_version: int) -> None:
        await self._ask(lambda: setattr(self, "version", weight_version))

    async def live_weights(self) -> MappedWeights:
        return self.live

    async def weight_version(self) -> int:
        return self.version


class Source:
    """A trainer whose export is its own tensors."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name=n, shape=tuple(t.shape), dtype="bfloat16", num_bytes=2 * t.numel())
            for n, t in self.tensors.items()
        )

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()

    @property
    def num_bytes(self) -> int:
        return sum(2 * t.numel() for t in self.tensors.values())

    def move(self, changed_frac: float = 1.0) -> None:
        """Flip the last mantissa bit of a random share of the elements."""
        for tensor in self.tensors.values():
            bits = tensor.view(torch.int16)
            if changed_frac >= 1:
                bits ^= 1
            else:
                num = max(1, int(bits.numel() * changed_frac))
                where = torch.randint(bits.numel(), (num,), device=bits.device).unique()
                bits.view(-1)[where] ^= 1
        synchronize()


@dataclass(frozen=True)
class Settings:
    """The publisher's settings, without the config section (and pydantic)."""

    bucket_bytes: int
    max_buckets: int = 2
    delta: bool = False
    on_replica_failure: Literal["quarantine", "abort"] = "abort"
    commit_order: Literal["together", "rolling"] = "together"
    export_deadline_s: float = 120.0
    open_deadline_s: float = 120.0
    receive_deadline_s: float = 120.0
    prove_deadline_s: float = 120.0
    commit_deadline_s: float = 120.0
    abort_deadline_s: float = 10.0


def synchronize() -> None:
    if torch.cuda.is_available():
        for idx in range(torch.cuda.device_count()):
            torch.cuda.synchronize(idx)


def best_s(work: Callable[[], object], reps: int = 5) -> float:
    """Seconds of the fastest of `reps` runs after one to warm up."""
    seconds = []
    for _ in range(reps + 1):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def copy_rate(source: Tensor, target: Tensor) -> float:
    """GB/s of payload of a plain copy, eight in a row."""

    def copies() -> None:
        for _ in range(8):
            target.copy_(source, non_blocking=True)

    return 8 * source.numel() / best_s(copies, 3) / 1e9


class Table:
    """Rows now, and all of them again at the end."""

    def __init__(self) -> None:
        self.rows: list[str] = []

    def add(self, row: str) -> None:
        self.rows.append(row)
        print(row, flush=True)


HEADER = (
    f"{'what':34s} {'GB':>6s} {'stream ms':>9s} {'whole ms':>9s} {'stream GB/s':>11s} {'whole GB/s':>10s} "
    f"{'link GB/s':>9s} {'stream/link':>11s} {'prove ms':>8s} {'commit ms':>9s} {'digest ms':>9s} {'export ms':>9s}"
)


def row_of(what: str, report: PublicationReport, link: float) -> str:
    gb = report.num_bytes / 1e9
    replica = report.replicas[0]
    return (
        f"{what:34s} {gb:6.2f} {report.stream_s * 1e3:9.1f} {report.total_s * 1e3:9.1f} {gb / report.stream_s:11.2f} "
        f"{report.gb_per_s:10.2f} {link:9.1f} {gb / report.stream_s / link:11.2f} {report.prove_s * 1e3:8.1f} "
        f"{report.commit_s * 1e3:9.1f} {replica.digest_s * 1e3:9.1f} {report.export_s * 1e3:9.1f}"
    )


async def measured(
    publisher: Publisher, source: Source, reps: int, *, moved: bool = True
) -> PublicationReport:
    """The fastest of `reps` publications after one that allocates and warms up."""
    reports = []
    for version in range(1, reps + 2):
        reports.append(await publisher.publish(version, moved=moved))
        assert not publisher.quarantined, publisher.quarantined
        source.move()
    return min(reports[1:], key=lambda report: report.total_s)


# ---- the other process


@contextlib.asynccontextmanager
async def replica_process(
    model: str, device: torch.device, transport: str, bucket_bytes: int, folder: str, *, is_bare: bool = False
) -> AsyncIterator[subprocess.Popen[bytes]]:
    args = {
        "model": model, "device": str(device), "transport": transport, "bucket_bytes": bucket_bytes, "folder": folder,
        "is_bare": is_bare,
    }  # fmt: skip
    process = subprocess.Popen(
        [*REPLICA_COMMAND, json.dumps(args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


async def replica_main(args: dict[str, Any]) -> None:
    device = torch.device(args["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    receiver: Receiver
    if args["transport"] == "ipc":
        receiver = IpcReceiver()
    elif args["transport"] in ("nccl", "gloo"):
        group = join_group(args["transport"], 1, device, args["folder"])
        broadcast_rate(group, args["bucket_bytes"])
        receiver = BroadcastReceiver(group, max_bucket_bytes=args["bucket_bytes"])
    else:
        receiver = ShmReceiver(args["folder"])
    engine = zero_engine(args["model"], device)
    server = ReplicaServer(InprocPort(engine), receiver)
    if args["is_bare"]:
        leave_out_digests()
    print(await server.start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)  # process groups and mappings may wait for each other; there is nothing to save


def leave_out_digests() -> None:
    """Every digest of an arriving or exported tensor becomes 0: what a publication takes without them."""

    def launch(tensors: Sequence[Tensor]) -> PendingDigests:
        return PendingDigests(torch.zeros(len(tensors), 2, dtype=torch.int64), ("",) * len(tensors))

    bucket_module.launch = launch


def shared_folder(bucket_bytes: int) -> str:
    """Where two slots fit, in memory if possible."""
    for folder in ("/dev/shm", tempfile.gettempdir()):
        if Path(folder).exists() and shutil.disk_usage(folder).free > 4 * bucket_bytes:
            return folder
    return tempfile.gettempdir()


def join_group(backend: Any, rank: int, device: torch.device, folder: str) -> BroadcastGroup:
    return BroadcastGroup.create(
        backend, rank=rank, size=2, device=device, deadline_s=120, file=str(Path(folder) / "store")
    )


def broadcast_rate(group: BroadcastGroup, bucket_bytes: int) -> float:
    """GB/s of plain broadcasts of a bucket; both ranks call it."""
    data = torch.zeros(bucket_bytes, dtype=torch.uint8, device=group.device)
    seconds = [group.broadcast(data) for _ in range(12)]
    return bucket_bytes / min(seconds[2:]) / 1e9


async def between_processes(
    model: str, source: Source, transport: str, target: torch.device, settings: Settings, link: float | None,
    what: str, table: Table, reps: int, body: Callable[[Publisher, float], Any] | None = None, is_bare: bool = False,
) -> None:  # fmt: skip
    """Publish to a replica in a process of its own, over one transport."""
    held = bucket_module.launch
    if is_bare:
        leave_out_digests()
    with tempfile.TemporaryDirectory(dir=shared_folder(settings.bucket_bytes)) as folder:
        async with replica_process(
            model, target, transport, settings.bucket_bytes, folder, is_bare=is_bare
        ) as process:
            device = next(iter(source.tensors.values())).device
            sender: Sender
            if transport == "ipc":
                sender = IpcSender()
            elif transport in ("nccl", "gloo"):
                group = await asyncio.to_thread(join_group, transport, 0, device, folder)
                link = await asyncio.to_thread(broadcast_rate, group, settings.bucket_bytes)
                sender = BroadcastSender(group)
            else:
                sender = ShmSender(folder)
            assert process.stdout is not None
            port_number = int(await asyncio.to_thread(process.stdout.readline))
            port = RemotePort(0, sender, port=port_number)
            publisher = Publisher(source, [port], settings, buffers=sender.buffer)
            if body is not None:
                await body(publisher, link or float("nan"))
            else:
                report = await measured(publisher, source, reps, moved=not is_bare)
                table.add(row_of(what, report, link or float("nan")))
            bucket_module.launch = held
            await port.close()
            sender.close()
            publisher.close()


# ---- the parts


def bench_digest(model: str, device: torch.device, table: Table) -> None:
    weights = list(random_weights(model, device).values())
    num_bytes = sum(2 * w.numel() for w in weights)
    together = best_s(lambda: digests(weights))
    one_by_one = best_s(lambda: [digest_module.launch([w]) for w in weights][-1].results(), 3)
    table.add(
        f"digest {model}B on {device}: {num_bytes / 1e9:.2f} GB, {len(weights)} tensors: one launch "
        f"{together * 1e3:.2f} ms = {num_bytes / together / 1e9:.1f} GB/s, a launch each {one_by_one * 1e3:.2f} ms"
    )
    if device.type == "cuda" and digest_module._has_triton() and model == "8":
        from rollbook.sync import digest_triton

        held = digest_triton.TILE, digest_triton.STEP_ROWS, digest_triton.NUM_WARPS
        for tile, step, warps in (
            (256, 8, 4),
            (256, 4, 2),
            (512, 4, 4),
            (512, 8, 8),
            (1024, 4, 8),
            (256, 16, 4),
        ):
            digest_triton.TILE, digest_triton.STEP_ROWS, digest_triton.NUM_WARPS = tile, step, warps
            seconds = best_s(lambda: digests(weights), 3)
            table.add(f"  tile {tile} x {step} rows, {warps} warps: {num_bytes / seconds / 1e9:.0f} GB/s")
        digest_triton.TILE, digest_triton.STEP_ROWS, digest_triton.NUM_WARPS = held


async def bench_inproc(model: str, device: torch.device, settings: Settings, table: Table, reps: int) -> None:
    source = Source(random_weights(model, device))
    buffer = torch.empty(settings.bucket_bytes, dtype=torch.uint8, device=device)
    link = copy_rate(buffer, torch.empty_like(buffer))
    for what, engine in (("shared", engine_over(source.tensors)), ("inproc", zero_engine(model, device))):
        ports: list[WeightPort] = [InprocPort(engine)]
        publisher = Publisher(source, ports, settings)
        report = await measured(publisher, source, reps)
        table.add(row_of(f"{what} {model}B on {device}", report, link))
        publisher.close()


async def bench_delta(
    model: str, device: torch.device, transport: str, target: torch.device, settings: Settings, link: float | None,
    table: Table,
) -> None:  # fmt: skip
    """Full against delta at 0.1 to 100 % changed elements."""
    source = Source(random_weights(model, device))

    async def body(publisher: Publisher, _: float) -> None:
        version = 0
        for frac in (None, 0.0, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0):
            reports = []
            for _ in range(2):
                version += 1
                if frac:
                    source.move(frac)
                reports.append(await publisher.publish(version, moved=bool(frac) or version == 1))
                if frac is None:
                    break
            report = min(reports, key=lambda r: r.total_s)
            name = "first, full" if frac is None else f"{100 * report.changed_frac:.2f} % changed"
            table.add(
                f"delta {model}B {transport} to {target}: {name:16s} sent {report.sent_bytes / 1e9:7.4f} of "
                f"{report.num_bytes / 1e9:.2f} GB, stream {report.stream_s * 1e3:8.1f} ms, whole "
                f"{report.total_s * 1e3:8.1f} ms, base {report.base_version}"
            )

    delta = replace(settings, delta=True)
    full = replace(settings, delta=False)
    await between_processes(
        model, source, transport, target, full, link, f"full {model}B {transport} to {target}", table, 2
    )
    await between_processes(model, source, transport, target, delta, link, "", table, 1, body)


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", choices=list(MODELS))
    parser.add_argument("--parts", nargs="*", default=["digest", "inproc", "host", "ipc", "nccl", "delta"])
    parser.add_argument("--bucket-mib", type=int, nargs="*", default=[256])
    parser.add_argument("--max-buckets", type=int, nargs="*", default=[2])
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--replica", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.replica:
        await replica_main(json.loads(args.replica))
        return
    num_gpus = torch.cuda.device_count()
    device = torch.device("cuda:0" if num_gpus else "cpu")
    peer = torch.device("cuda:1" if num_gpus > 1 else device)
    models = args.models or (["0.5", "8"] if num_gpus else ["0.05"])
    print(
        f"torch {torch.__version__}, {num_gpus} GPUs"
        + (f" ({torch.cuda.get_device_name(0)})" if num_gpus else "")
        + f", {torch.get_num_threads()} threads, {os.cpu_count()} cores, model sizes {models}\n{HEADER}",
        flush=True,
    )
    table = Table()
    kinds = [(mib, num, False) for mib in args.bucket_mib for num in args.max_buckets]
    kinds += [(*kinds[-1][:2], True)] if "bare" in args.parts else []
    for bucket_mib, max_buckets, is_bare in kinds:
        settings = Settings(bucket_mib * MIB, max_buckets)
        is_first = (bucket_mib, max_buckets, is_bare) == kinds[0]
        for model in models:
            label = f"{model}B, {max_buckets} x {bucket_mib} MiB" + (", bare" if is_bare else "")

            publish = partial(fresh, model, device)

            def remote(transport: str, target: torch.device, what: str, link: float | None) -> Work:
                what = f"{what} {label}"  # noqa: B023 (awaited before the loop goes on)
                return publish(transport, target, settings, link, what, table, args.reps, is_bare)  # noqa: B023

            if "digest" in args.parts and is_first:
                bench_digest(model, device, table)
            if "inproc" in args.parts and is_first:
                await tried(bench_inproc(model, device, settings, table, args.reps), f"inproc {label}", table)
            if "host" in args.parts:
                link = host_link(device, settings.bucket_bytes)
                await tried(remote("shm", peer, "host (shm)", link), f"host {label}", table)
            if num_gpus and "ipc" in args.parts:
                for target in dict.fromkeys((device, peer)):
                    link = peer_link(device, target, settings.bucket_bytes)
                    await tried(remote("ipc", target, f"ipc to {target}", link), f"ipc {label}", table)
            if "nccl" in args.parts and (num_gpus > 1 or not num_gpus):
                backend = "nccl" if num_gpus else "gloo"
                await tried(remote(backend, peer, backend, None), f"{backend} {label}", table)
        if "delta" in args.parts and is_first:
            links = {"shm": host_link(device, settings.bucket_bytes)}
            if num_gpus:
                links["ipc"] = peer_link(device, peer, settings.bucket_bytes)
            for transport, link in links.items():
                work = bench_delta(models[-1], device, transport, peer, settings, link, table)
                await tried(work, f"delta over {transport}", table)
    print("\n==== summary\n" + HEADER + "\n" + "\n".join(table.rows))


async def fresh(
    model: str, device: torch.device, transport: str, target: torch.device, settings: Settings, link: float | None,
    what: str, table: Table, reps: int, is_bare: bool,
) -> None:  # fmt: skip
    """`between_processes` from new random weights."""
    source = Source(random_weights(model, device))
    await between_processes(
        model, source, transport, target, settings, link, what, table, reps, is_bare=is_bare
    )


async def tried(work: Work, what: str, table: Table) -> None:
    """One part that fails does not take the others' results with it."""
    try:
        await work
    except Exception as error:
        table.add(f"{what}: FAILED, {type(error).__name__}: {error}")
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def peer_link(device: torch.device, target: torch.device, num_bytes: int) -> float:
    """GB/s of a copy from one GPU's memory to another's, or within one."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return copy_rate(source, torch.empty(num_bytes, dtype=torch.uint8, device=target))


def host_link(device: torch.device, num_bytes: int) -> float:
    """GB/s of the slower direction between the device and page-locked host memory; of a host copy without a GPU."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    other = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return min(copy_rate(host, other), copy_rate(other, host))


if __name__ == "__main__":
    asyncio.run(main())
    sys.stdout.flush()
    os._exit(0)  # process groups may wait for a peer that is gone
