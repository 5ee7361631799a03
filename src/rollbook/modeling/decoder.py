"""A plain decoder for the Llama family (Llama, Mistral, Qwen2, Qwen3) with Hugging Face's tensor names.

It exists beside the transformers classes for two reasons: it starts without importing them (seconds), and its
activations take less memory. The arithmetic, including where bfloat16 rounds, is that of the transformers
classes; tests compare the two. Attention is a function by name, with the signature that transformers uses, so
one function serves both (`attention.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollbook.errors import ConfigError, nearest_name
from rollbook.modeling.attention import ATTENTIONS

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The facts of a config.json that this decoder reads, under their names there."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    llama3_rope: Mapping[str, float] | None = None
    """factor, low_freq_factor, high_freq_factor, original_max_position_embeddings; None: plain rotary."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...]
    """One entry a layer; None: all of the sequence."""
    initializer_range: float = 0.02
    source: Mapping[str, Any] = field(default_factory=dict)
    """The config.json this was read from, kept whole so that saving loses nothing."""

    eos_token_id: int | list[int] | None = None

    def get_text_config(self) -> DecoderConfig:
        return self


def unsupported_because(source: Mapping[str, Any]) -> str | None:
    """Why a config.json needs the transformers classes; None: this decoder covers it."""
    model_type = source.get("model_type")
    if model_type not in ARCHITECTURES:
        return f"model_type is {model_type!r}"
    architectures = source.get("architectures") or [ARCHITECTURES[model_type]]
    if architectures != [ARCHITECTURES[model_type]]:
        return f"architectures is {architectures}"
    for key in REQUIRED_KEYS:
        if key not in source:
            return f"it has no {key}"
    for key in ("quantization_config", "auto_map"):
        if source.get(key):
            return f"it has a {key}"
    if source.get("hidden_act", "silu") != "silu":
        return f"hidden_act is {source['hidden_act']!r}"
    if _rope(source).get("rope_type", "default") not in ("default", "llama3"):
        return f"rope_type is {_rope(source)['rope_type']!r}"
    if float(_rope(source).get("partial_rotary_factor", 1.0)) != 1.0:
        return "only a part of each head is rotated"
    if int(source.get("pretraining_tp", 1)) != 1:
        return "pretraining_tp is not 1"
    return None


def read_config(source: Mapping[str, Any]) -> DecoderConfig:
    """From a config.json of one of ARCHITECTURES. Raises ConfigError where `unsupported_because` gives a reason."""
    if reason := unsupported_because(source):
        raise ConfigError(
            f"the built-in decoder cannot run this model: {reason}", "set model.implementation to auto"
        )
    kind = str(source["model_type"])
    num_layers, num_heads = int(source["num_hidden_layers"]), int(source["num_attention_heads"])
    rope = _rope(source)
    llama3 = None
    if rope.get("rope_type", "default") == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        llama3 = {name: float(rope[name]) for name in names}
    return DecoderConfig(
        model_type=kind,
        vocab_size=int(source["vocab_size"]),
        hidden_size=int(source["hidden_size"]),
        intermediate_size=int(source["intermediate_size"]),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=int(source.get("num_key_value_heads") or num_heads),
        head_dim=int(
            source.get("head_dim") or (128 if kind == "qwen3" else source["hidden_size"] // num_heads)
        ),
        max_position_embeddings=int(source["max_position_embeddings"]),
        rms_norm_eps=float(source.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        llama3_rope=llama3,
        tie_word_embeddings=bool(source.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or bool(source.get("attention_bias", False)),
        out_bias=kind != "qwen2" and bool(source.get("attention_bias", False)),
        mlp_bias=bool(source.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
        sliding_windows=_windows(source, kind, num_layers),
        initializer_range=float(source.get("initializer_range", 0.02)),
        eos_token_id=source.get("eos_token_id"),
        source=dict(source),
    )


def write_config(config: DecoderConfig) -> dict[str, Any]:
    """A config.json that transformers and the engines read."""
    if config.source:
        return dict(config.source)
    return {
        "architectures": [ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.out_bias,
        "hidden_act": "silu",
        "initializer_range": config.initializer_range,
    }


@dataclass(slots=True)
class DecoderOutput:
    """As transformers' output classes, the part that is read here."""

    last_hidden_state: Tensor
    """[B, T, hidden] after the last norm."""
    logits: Tensor | None = None
    """[B, rows, V]."""


class Decoder(nn.Module):
    """A causal language model that is called like a transformers one: `base_model` gives hidden states."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderStack(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def base_model(self) -> DecoderStack:
        return self.model

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_attn_implementation(self, name: str) -> None:
        """Use the attention function of this name, a key of ATTENTIONS, from here on."""
        if name not in ATTENTIONS:
            raise ConfigError(f"there is no attention {name!r}", nearest_name(name, ATTENTIONS))
        self.model.attention = name

    def gradient_checkpointing_enable(self) -> None:
        self.model.gradient_checkpointing = True

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
        **attention: Any,
    ) -> DecoderOutput:
        """Logits of the rows `logits_to_keep` names: the last so many, or these; 0 is all."""
        hidden = self.model(input_ids, position_ids, **attention).last_hidden_state
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return DecoderOutput(hidden, self.lm_head(hidden[:, rows]))

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Normal weights of the config's width, ones for norms, zeros for biases; a function of `seed`."""
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self.named_parameters():
            if tensor.ndim == 1:
                tensor.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                draw = torch.empty(tensor.shape).normal_(
                    0.0, self.config.initializer_range, generator=generator
                )
                tensor.copy_(draw)


class DecoderStack(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.attention = "rollbook_packed"
        """Name of the attention function."""
        self.gradient_checkpointing = False
        # Not a buffer: casting the module must not round the frequencies.
        self.frequencies: Tensor | None = None
        # Weights are loaded or initialized later; on the meta device nn.Embedding's own draw costs seconds of imports.
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False, **arguments: Any
    ) -> DecoderOutput:
        """[B, T] ids and positions; `arguments` go to the attention function. There is no cache here."""
        hidden = self.embed_tokens(input_ids)
        if self.frequencies is None or self.frequencies.device != hidden.device:
            self.frequencies = rotary_frequencies(self.config).to(hidden.device)
        rotary = rotary_tables(position_ids, self.frequencies, hidden.dtype)
        for layer in self.layers:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                from torch.utils.checkpoint import checkpoint

                hidden = checkpoint(layer, hidden, rotary, self.attention, arguments, use_reentrant=False)
            else:
                hidden = layer(hidden, rotary, self.attention, arguments)
        return DecoderOutput(self.norm(hidden))


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer_idx)
        self.mlp = FeedForward(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attention: str, arguments: dict[str, Any]
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, attention, arguments)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Attention(nn.Module):
    """Projections and rotation around the attention function."""

    def __init__(self, config: DecoderConfig, layer_idx: int) -> None:
        super().__init__()
        width = config.head_dim
        self.layer_idx = layer_idx
        self.head_dim = width
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = width**-0.5
        self.sliding_window = config.sliding_windows[layer_idx]
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_attention_heads * width, config.hidden_size, bias=config.out_bias)
        self.q_norm = RMSNorm(width, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(width, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attention: str, arguments: dict[str, Any]
    ) -> Tensor:
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        query, key = self.q_proj(hidden).view(shape), self.k_proj(hidden).view(shape)
        value = self.v_proj(hidden).view(shape)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, rotary), rotate(key, rotary)
        out, _ = ATTENTIONS[attention](
            self,
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            None,
            scaling=self.scaling,
            dropout=0.0,
            sliding_window=self.sliding_window,
            **arguments,
        )
        projected: Tensor = self.o_proj(out.reshape(*hidden.shape[:-1], -1))
        return projected


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class RMSNorm(nn.Module):
    """x / rms(x) in at least float32, rounded to x's dtype, times the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return _normalize(x, self.weight, self.eps)[0]
        normed: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


def _normalize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed rows and 1 / rms of each."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inv_rms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
    inv_rms = inv_rms.div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * inv_rms).to(x.dtype).mul_(weight), inv_rms


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one number a row for the backward pass, where the plain operations keep three copies of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, inv_rms = _normalize(x, weight, eps)
        ctx.save_for_backward(x, weight, inv_rms)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        x, weight, inv_rms = ctx.saved_tensors
        normed, wide_weight = x.to(inv_rms.dtype) * inv_rms, weight.to(inv_rms.dtype)
        product = grad.to(inv_rms.dtype) * normed
        grad_weight = product.flatten(0, -2).sum(0)
        shared = torch.mv(product.flatten(0, -2), wide_weight).view(inv_rms.shape).div_(-x.shape[-1])
        grad_x = torch.mul(grad, wide_weight, out=product).addcmul_(normed, shared).mul_(inv_rms)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rotary_frequencies(config: DecoderConfig) -> Tensor:
    """[head_dim / 2] float32 radians a position; with `llama3_rope` long wavelengths are stretched.

    Source: rope scaling of Llama 3.1 as in its config.json; wavelengths above original/low are divided by
    `factor`, below original/high kept, and between the two interpolated.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim
    inv_freq = 1.0 / (config.rope_theta**exponents)
    if config.llama3_rope is None:
        return inv_freq
    scale = config.llama3_rope
    wavelengths = 2 * math.pi / inv_freq
    turns = scale["original_max_position_embeddings"] / wavelengths
    kept = (turns - scale["low_freq_factor"]) / (scale["high_freq_factor"] - scale["low_freq_factor"])
    kept = kept.clamp(0.0, 1.0)
    return inv_freq * kept + inv_freq / scale["factor"] * (1 - kept)


def rotary_tables(position_ids: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and signed sin, [B, T, 1, head_dim], for `rotate`."""
    angles = position_ids[..., None].to(inv_freq.dtype) * inv_freq
    cos, sin = angles.cos(), angles.sin()
    cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """[B, T, H, D] with its two halves rotated against each other."""
    rotated: Tensor = _Rotate.apply(x, *rotary)  # type: ignore[no-untyped-call]
    return rotated


class _Rotate(torch.autograd.Function):
    """A rotation; its gradient is rotated back by the same operations, and nothing of x is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.addcmul(x * cos, _swap_halves(x), sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return torch.addcmul(grads[0] * cos, _swap_halves(grads[0]), sin, value=-1), None, None


def _swap_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((second, first), -1)


def _rope(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary settings, as transformers 5 nests them (rope_parameters) or 4 spreads them."""
    nested = source.get("rope_parameters")
    if nested:
        return dict(nested)
    scaling = dict(source.get("rope_scaling") or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {"rope_theta": source.get("rope_theta", 10_000.0), **scaling, "rope_type": kind}


def _windows(source: Mapping[str, Any], kind: str, num_layers: int) -> tuple[int | None, ...]:
    window = source.get("sliding_window", 4096)  # the default of the classes that have one
    if window is None or kind == "llama":
        return (None,) * num_layers
    if kind == "mistral":
        return (int(window),) * num_layers
    if not source.get("use_sliding_window", False):
        return (None,) * num_layers
    layer_types = source.get("layer_types")
    if layer_types is None:
        first = int(source.get("max_window_layers", 28))
        layer_types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return tuple(int(window) if t == "sliding_attention" else None for t in layer_types)
