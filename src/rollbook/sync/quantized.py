"""Weights quantized on the trainer's side, in the scheme the engine computes with.

`QuantizedSource` stands between the trainer's export and the publisher, `QuantizedWeights` between the replica's
transaction and an engine that computes in its own dtype. Every matrix becomes two tensors of the manifest, the codes
under the matrix's own name and the scales beside it, so that both are announced, carried, digested and proven like
any other tensor; the proof also holds what the engine computes with to be what codes and scales say, bit for bit.

    int8        one float32 scale per output channel       w ≈ codes · weight_scale           |error| ≤ scale / 2
    fp8_block   float8_e4m3fn, one float32 scale per        w ≈ codes · weight_scale_inv       |error| ≤ |w| / 16,
                128 x 128 block                                                                 above 2^-6 of the scale

Names and shapes of the scales are those of Hugging Face checkpoints in these schemes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollbook.errors import SyncError
from rollbook.sync.bucket import DigestLedger
from rollbook.sync.digest import fold
from rollbook.weights import LiveWeights, TensorSpec, WeightSource

Scheme = Literal["int8", "fp8_block"]

BLOCK = 128
INT8_MAX = 127.0
FP8_MAX = 448.0
SCALE_SUFFIX = {"int8": "_scale", "fp8_block": "_scale_inv"}
CODE_DTYPE = {"int8": torch.int8, "fp8_block": torch.float8_e4m3fn}


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """What is quantized: linear layers, not norms, embeddings, heads or routers."""
    is_special = any(part in name for part in ("embed", "lm_head", "norm", "mlp.gate."))
    return len(shape) == 2 and name.endswith(".weight") and not is_special


class QuantizedSource:
    """A `WeightSource` whose matrices are codes and scales.

    Args:
        source: the trainer's export.
        scheme: of the engine.
    """

    def __init__(self, source: WeightSource, scheme: Scheme) -> None:
        self._source = source
        self._scheme: Scheme = scheme
        self._exported = DigestLedger()

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return quantized_specs(self._source.weight_specs(), self._scheme)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        self._exported = DigestLedger(hold_bytes=0)  # what is gathered for the publication alone is not kept
        for name, tensor in self._source.export_weights():
            self._exported.add(name, tensor)
            if not is_matrix(name, tuple(tensor.shape)):
                yield name, tensor
                continue
            if not bool(torch.isfinite(tensor).all()):
                raise SyncError(
                    f"{name} holds values that are not finite and cannot be quantized",
                    "the trainer has diverged: look at its gradients before publishing",
                )
            codes, scales = quantize(tensor, self._scheme)
            yield name, codes
            yield name + SCALE_SUFFIX[self._scheme], scales

    def digest_before_rounding(self) -> str:
        """Of the weights that the last export was made of: an update may move them, and no code or scale with them."""
        return fold(self._exported.results())


class QuantizedWeights:
    """`LiveWeights` of an engine that computes in its own dtype, in the terms of a quantized manifest.

    Codes and scales are kept beside the engine's weights (about one byte a parameter), and decoded into them when they
    were written. Reading codes compares: where the engine's matrix is not what codes and scales say, bits come back
    that no trainer sent, and the proof fails by name.
    """

    def __init__(self, live: LiveWeights, scheme: Scheme) -> None:
        self._live = live
        self._scheme: Scheme = scheme
        self._matrices = {name for name, spec in live.specs().items() if is_matrix(name, spec.shape)}
        self._matrix_of = {name + SCALE_SUFFIX[scheme]: name for name in self._matrices}
        self._specs = {spec.name: spec for spec in quantized_specs(live.specs().values(), scheme)}
        self._held: dict[str, Tensor] = {}
        """Codes and scales, by their names in the manifest."""
        self._is_stale: set[str] = set()
        """Matrices whose codes or scales were written since they were decoded."""

    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def write(self, name: str, tensor: Tensor) -> None:
        matrix = self._matrix_of.get(name, name)
        if matrix not in self._matrices:
            self._live.write(name, tensor)
            return
        self._make(matrix)
        held, spec = self._held[name], self._specs[name]
        if tensor.shape != held.shape or tensor.dtype != held.dtype:
            raise SyncError(
                f"{name}: the publication carries {tuple(tensor.shape)} {tensor.dtype}, the engine holds "
                f"{spec.shape} {spec.dtype}",
                "quantize on the trainer's side in the engine's scheme (sync.quantize)",
            )
        held.copy_(tensor)
        self._is_stale.add(matrix)

    def read(self, name: str) -> Tensor:
        matrix = self._matrix_of.get(name, name)
        if matrix not in self._matrices:
            return self._live.read(name)
        self._make(matrix)
        held = self._held[name]
        if name != matrix:
            return held
        live = self._live.read(matrix)
        decoded = dequantize(held, self._held[matrix + SCALE_SUFFIX[self._scheme]], self._scheme).to(
            live.dtype
        )
        if matrix in self._is_stale:
            self._live.write(matrix, decoded)
            self._is_stale.discard(matrix)
            live = self._live.read(matrix)
        if torch.equal(live, decoded):
            return held
        return (held.view(torch.uint8) ^ 1).view(held.dtype)

    def _make(self, matrix: str) -> None:
        """Before anything was published: what the engine's matrix would be sent as."""
        if matrix not in self._held:
            codes, scales = quantize(self._live.read(matrix), self._scheme)
            self._held[matrix], self._held[matrix + SCALE_SUFFIX[self._scheme]] = codes, scales


def quantized_specs(specs: Iterable[TensorSpec], scheme: Scheme) -> tuple[TensorSpec, ...]:
    """A manifest's tensors, with codes and scales in the place of the matrices."""
    made: list[TensorSpec] = []
    for spec in specs:
        if not is_matrix(spec.name, spec.shape):
            made.append(spec)
            continue
        rows, columns = spec.shape
        scale = (rows, 1) if scheme == "int8" else (-(-rows // BLOCK), -(-columns // BLOCK))
        dtype = str(CODE_DTYPE[scheme]).removeprefix("torch.")
        made.append(TensorSpec(name=spec.name, shape=spec.shape, dtype=dtype, num_bytes=rows * columns))
        made.append(
            TensorSpec(
                name=spec.name + SCALE_SUFFIX[scheme],
                shape=scale,
                dtype="float32",
                num_bytes=4 * scale[0] * scale[1],
            )
        )
    return tuple(made)


def quantize(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """[m, n] finite -> codes [m, n] and float32 scales ([m, 1], or [ceil(m/128), ceil(n/128)])."""
    exact = weight.detach().float()
    if scheme == "int8":
        scales = _scale(exact.abs().amax(1, keepdim=True), INT8_MAX)
        return (exact / scales).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scales
    m, n = exact.shape
    rows, columns = -(-m // BLOCK), -(-n // BLOCK)
    blocks = pad(exact, (0, -n % BLOCK, 0, -m % BLOCK)).view(rows, BLOCK, columns, BLOCK)
    scales = _scale(blocks.abs().amax((1, 3)), FP8_MAX)
    codes = (blocks / scales[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(2, 3).flatten(0, 1)[:m, :n].contiguous(), scales


def dequantize(codes: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """[m, n] float32: what an engine computes with."""
    if scheme == "int8":
        return codes.float() * scales
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return codes.float() * spread[: codes.shape[0], : codes.shape[1]]


def _scale(largest: Tensor, code_max: float) -> Tensor:
    """Zero rows keep a scale of 1, so that nothing divides by zero."""
    return torch.where(largest > 0, largest / code_max, torch.ones_like(largest))


def as_sent(source: WeightSource, scheme: Literal["none"] | Scheme) -> WeightSource:
    """What the engines are sent of the trainer's weights (`sync.quantize`)."""
    return source if scheme == "none" else QuantizedSource(source, scheme)


def as_sent_to(live: LiveWeights, scheme: Literal["none"] | Scheme) -> LiveWeights:
    """An engine's weights in the terms of what it is sent."""
    return live if scheme == "none" else QuantizedWeights(live, scheme)
