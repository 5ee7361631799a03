"""A trainer divided over several GPUs by FSDP2 against one rank: step time, bytes a rank, and the gathered export.

    PYTHONPATH=src python bench/gpu/fsdp2.py                        # one and two GPUs, 0.8 B parameters; half a minute
    PYTHONPATH=src python bench/gpu/fsdp2.py --device cpu --tiny    # the same over gloo, a second of computing

Each number of ranks is a run of fresh processes on one batch of random tokens: two updates (the second is timed), then
the export gathered in buckets of `--bucket-mib`, twice, with its digests. The fold of the digests after the updates is
the same on every rank; between one and two ranks bfloat16 sums differ, so there the loss is compared, and before the
updates the digests.

Expectations, written before the first run (H200, bfloat16 over float32 masters, 16 x 2048 tokens):
- memory of a rank: 16 B a parameter on one rank plus 2 B of compute weights; with two ranks 16/2, and about two layers
  and the embedding gathered: a little over half.
- a step with two ranks: half the tokens each, all-gather and reduce-scatter of 2 and 4 B a parameter over NVLink,
  mostly hidden: at least 1.6 times faster than one rank.
- export: an all-gather over NVLink (about 200 GB/s into each rank) and one copy on the device (4 TB/s read and write):
  150 GB/s or more with buckets of 256 MiB; peak of what it takes: two buckets.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rollbook.modeling.config import ModelConfig, NewModelConfig
from rollbook.sync.bucket import DigestLedger
from rollbook.sync.digest import fold
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.objective import SupervisedObjective
from rollbook.trainer.parallel import ALONE, Ranks
from rollbook.trainer.trainer import Trainer
from rollbook.types import TrainSequence

TIMEOUT_S = 120.0


def model_config(device: str, *, is_tiny: bool) -> ModelConfig:
    new = NewModelConfig(
        architecture="qwen3",
        hidden_size=64 if is_tiny else 2048,
        num_layers=2 if is_tiny else 10,
        num_heads=4 if is_tiny else 16,
        num_kv_heads=2 if is_tiny else 8,
        intermediate_size=96 if is_tiny else 6144,
        max_position=4096,
        vocab_size=500 if is_tiny else 151_936,
    )
    return ModelConfig(new=new, dtype="bfloat16", device=device)


def sequences(num: int, num_tokens: int, vocab_size: int) -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    is_action = np.arange(num_tokens) >= num_tokens // 8
    return [
        TrainSequence(
            group_id=i,
            member_idx=0,
            source="bench",
            token_ids=rng.integers(0, vocab_size, num_tokens).astype(np.int32),
            action_mask=is_action,
            loss_mask=is_action.copy(),
            behavior_logprobs=np.zeros(num_tokens, np.float32),
            reward=0.0,
            oldest_version=0,
        )
        for i in range(num)
    ]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def export(trainer: Trainer) -> tuple[str, float]:
    """Digest of everything, and the seconds of a second pass without digests."""
    ledger = DigestLedger()
    for name, tensor in trainer.export_weights():
        ledger.add(name, tensor)
    digest = fold(ledger.results())
    device = trainer.ranks.device
    wait(device)
    began_at_s = time.perf_counter()
    for _ in trainer.export_weights():
        pass
    wait(device)
    return digest, time.perf_counter() - began_at_s


def rank_main(rank: int, size: int, folder: str, options: argparse.Namespace) -> None:
    device = torch.device(options.device if options.device == "cpu" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    ranks = ALONE
    if size > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        ranks = Ranks(dist.group.WORLD, device)
    num, num_tokens = (6, 32) if options.tiny else (16, 2048)
    config = TrainerConfig(
        lr=1e-5,
        micro_batch_tokens=64 if options.tiny else 8192,
        gather_bytes=4096 if options.tiny else options.bucket_mib << 20,
        measure_entropy=False,
        gradient_checkpointing=not options.tiny,
    )
    began_at_s = time.perf_counter()
    trainer = Trainer(
        config,
        model_config(str(device), is_tiny=options.tiny),
        max_response_tokens=num_tokens,
        ranks=ranks,
    )
    out: dict[str, Any] = {"build_s": time.perf_counter() - began_at_s}
    specs = trainer.weight_specs()
    out["parameters"] = sum(int(np.prod(spec.shape)) for spec in specs)
    num_bytes = sum(spec.num_bytes for spec in specs)
    out["digest_before"], seconds = export(trainer)
    out["export_gb_per_s"] = num_bytes / seconds / 1e9
    given = sequences(num, num_tokens, trainer.model.facts.vocab_size)
    for step in range(2):
        batch = trainer.make_batch(given, step=step, weight_version=0)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        wait(device)
        began_at_s = time.perf_counter()
        values = trainer.update(batch, SupervisedObjective())
        wait(device)
        out["step_s"] = time.perf_counter() - began_at_s
        out[f"loss_{step}"] = values["warmup/loss"].result()
        out[f"grad_norm_{step}"] = values["actor/grad_norm"].result()
    if device.type == "cuda":
        out["peak_step_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    out["digest_after"], seconds = export(trainer)
    if device.type == "cuda":
        out["held_gib"] = held / 2**30
        out["peak_export_mib"] = (torch.cuda.max_memory_allocated(device) - held) / 2**20
    out["export_gb_per_s"] = num_bytes / seconds / 1e9
    Path(folder, f"{rank}.json").write_text(json.dumps(out), encoding="utf-8")
    if size > 1:
        dist.destroy_process_group()


def run(size: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=rank_main, args=(rank, size, folder, options), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        ends_at_s = time.monotonic() + TIMEOUT_S
        for process in processes:
            process.join(max(ends_at_s - time.monotonic(), 0.1))
        for process in processes:
            if process.exitcode != 0:
                process.kill()
        assert all(process.exitcode == 0 for process in processes), f"{size} ranks: a rank failed or hung"
        return [json.loads(Path(folder, f"{r}.json").read_text(encoding="utf-8")) for r in range(size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--bucket-mib", type=int, default=256)
    options = parser.parse_args()
    print("expected: 2 ranks >= 1.6x the speed and a little over half the bytes of one; export >= 150 GB/s")
    results = {size: run(size, options) for size in options.ranks}
    for size, ranks in results.items():
        for rank, out in enumerate(ranks):
            shown = {name: round(v, 4) if isinstance(v, float) else v for name, v in out.items()}
            print(f"ranks={size} rank={rank} {json.dumps(shown)}")
    every = [out for ranks in results.values() for out in ranks]
    assert len({out["digest_before"] for out in every}) == 1, "exports of one model differ"
    for ranks in results.values():
        assert len({out["digest_after"] for out in ranks}) == 1, "ranks export different weights"
    losses = [out["loss_1"] for out in every]
    assert max(losses) - min(losses) < 2e-2, losses
    if len(results) > 1:
        one, more = (results[size][0] for size in (min(results), max(results)))
        print(f"speed: {one['step_s'] / more['step_s']:.2f} x")
    print("equal: exports bit for bit before the updates, losses after them within 2e-2")


if __name__ == "__main__":
    main()
