"""`rollbook calibrate`: measure this machine's ceilings into a hardware.toml."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Annotated, Optional

import typer


def command(
    config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(help="A run's TOML file: its model is measured too, by its own engine and trainer."),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write.")] = Path("hardware.toml"),
    device: Annotated[str, typer.Option(help="cpu or cuda; a config's own device wins.")] = "cpu",
    set_: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", metavar="A.B=C", help="Override one field of the config; may be repeated."),
    ] = None,
) -> None:
    """Measure this machine's ceilings, and with a config the run's model on it, into a hardware.toml.

    Example: rollbook calibrate examples/addition.toml -o hardware.toml
    """
    from rollbook.controller.entry import calibrate
    from rollbook.observe.core_waits import Waited

    began_at_s = monotonic()
    with Waited() as waited:
        machine = calibrate(config, set_ or [], device=device)
    machine = replace(machine, core_wait_frac=waited.seconds / (monotonic() - began_at_s))
    machine.write(output)
    for dtype, rate in machine.gemm_flops_per_s.items():
        print(f"GEMM {dtype:<9} {rate / 1e12:8.3f} TFLOP/s")
    print(f"copy           {machine.copy_bytes_per_s / 1e9:8.1f} GB/s, bytes read and written")
    print(f"small operation {machine.launch_s * 1e6:7.1f} us")
    if machine.decode is not None and machine.train is not None:
        decode, train = machine.decode, machine.train
        print(
            f"decode step    {decode.base_s * 1e3:8.3f} ms + {decode.per_row_s * 1e6:.2f} us a row"
            f" + {decode.per_row_token_s * 1e9:.2f} ns a row and context token (fit error {decode.error_frac:.1%})"
        )
        print(f"prefill        {decode.prefill_tokens_per_s:8.0f} tokens/s")
        print(
            f"train          {train.tokens_per_s:8.0f} tokens/s + {train.per_micro_batch_s * 1e3:.2f} ms a micro batch"
            f" (fit error {train.error_frac:.1%})"
        )
        moved = (
            f"{1e9 / machine.digest_bytes_per_s:.2f} s a GB" if machine.digest_bytes_per_s else "by reference"
        )
        print(f"publication    {moved} + {machine.sync_base_s * 1e3:.1f} ms of probing")
    if machine.host is not None:
        host = machine.host
        each_us = [s * 1e6 for s in (machine.reward_s, host.pack_s, host.advantage_s, host.report_s)]
        print(
            "a trajectory   {:.0f} us to ask for and score, {:.0f} to pack, {:.0f} for its advantage, {:.0f} to "
            "report".format(*each_us)
        )
    print(output)
