"""The shape of a model, and what follows from it: parameters, KV bytes, FLOPs per token.

Shapes come from the registry (`data/models.toml`) or a Hugging Face `config.json`. Norms and small biases are
counted; vision towers and multi-token-prediction layers are not.
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from rollbook.errors import ConfigError, nearest_name
from rollbook.ledger.quantity import MOST_COUNT


@dataclass(frozen=True, kw_only=True)  # no slots: what follows from the shape is computed once
class ModelSpec:
    """Architecture of a decoder-only language model. Zero means that the model has no such part."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int = 0
    head_dim: int = 0
    """Width of a head of Q and K."""
    intermediate_size: int = 0
    """Width of a dense layer's feed-forward."""
    mlp_matrices: int = 3
    """3 for gated feed-forwards (gate, up, down), 2 for plain ones."""
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    has_attention_gate: bool = False
    """Q carries a gate of its own width (Qwen3-Next, Qwen3.5)."""
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    """Width of all shared experts together."""
    num_dense_layers: int = 0
    """Layers of a mixture-of-experts model whose feed-forward is dense."""
    expert_input_size: int = 0
    """Width that the experts read and write where it is not `hidden_size` (latent experts)."""
    kv_lora_rank: int = 0
    """Latent attention (MLA): width of the compressed KV."""
    q_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    sliding_window: int = 0
    num_sliding_layers: int = 0
    num_linear_layers: int = 0
    """Layers with a recurrent state (gated DeltaNet, Mamba-2) in place of attention."""
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_head_dim: int = 0
    linear_state_dim: int = 0
    """Second side of a head's state; 0: as `linear_head_dim`."""
    linear_conv_kernel: int = 0
    num_attention_layers: int = 0
    """Layers with softmax attention; 0: all that are not linear."""
    num_mlp_layers: int = 0
    """Layers with a feed-forward; 0: all."""
    max_context_tokens: int = 0
    """Longest context the model was released for; 0 when unknown."""
    published_params: int = 0
    """Total as its card or paper gives it; 0 when no exact figure was published."""
    published_active_params: int = 0
    quantized: str = ""
    """Storage of the released weights when not bfloat16, such as "mxfp4 experts"."""
    is_encoder: bool = False
    """Generates nothing: a reward model at most."""
    assumed: tuple[str, ...] = ()
    """What the reader of an unknown architecture had to assume."""
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "vocab_size", "num_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"model {self.name}: {name} is {getattr(self, name)}", "correct the model's shape"
                )
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int) and value < 0:
                raise ConfigError(f"model {self.name}: {f.name} is {value}", "correct the model's shape")
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_heads)
        if self.head_dim < 1:
            raise ConfigError(
                f"model {self.name}: {self.num_heads} heads share a hidden size of {self.hidden_size}",
                "correct the model's shape, or give head_dim",
            )
        object.__setattr__(self, "v_head_dim", self.v_head_dim or self.head_dim)
        object.__setattr__(self, "linear_state_dim", self.linear_state_dim or self.linear_head_dim)
        attention = self.num_attention_layers or self.num_layers - self.num_linear_layers
        object.__setattr__(self, "num_attention_layers", attention)
        object.__setattr__(self, "num_mlp_layers", self.num_mlp_layers or self.num_layers)

    @property
    def kind(self) -> str:
        """ "dense" or "moe"."""
        return "moe" if self.num_experts else "dense"

    @property
    def num_moe_layers(self) -> int:
        return self.num_mlp_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def embedding_params(self) -> int:
        """Input embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def head_params(self) -> int:
        """Output matrix, also when its storage is the embedding's."""
        return self.vocab_size * self.hidden_size

    @functools.cached_property
    def attention_params_per_layer(self) -> int:
        """Projections (and their biases and norms) of one softmax-attention layer."""
        if self.kv_lora_rank:
            return self._mla_params()
        q = self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        params = (
            self.hidden_size * (q * (2 if self.has_attention_gate else 1) + 2 * kv) + q * self.hidden_size
        )
        if self.qkv_bias:
            params += q + 2 * kv
        if self.qk_norm:
            params += 2 * self.head_dim
        return params

    def _mla_params(self) -> int:
        """Source: DeepSeek-V2, arXiv:2405.04434: compressed Q and KV, shared rope key, up-projections."""
        qk = self.qk_nope_head_dim + self.qk_rope_head_dim
        heads, hidden, rank = self.num_heads, self.hidden_size, self.kv_lora_rank
        if self.q_lora_rank:
            q = hidden * self.q_lora_rank + self.q_lora_rank + self.q_lora_rank * heads * qk
        else:
            q = hidden * heads * qk
        kv = (
            hidden * (rank + self.qk_rope_head_dim)
            + rank
            + rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        )
        return q + kv + heads * self.v_head_dim * hidden

    @functools.cached_property
    def linear_params_per_layer(self) -> int:
        """A gated DeltaNet layer: Q, K, V, gate, beta, decay, convolution, output."""
        if not self.num_linear_layers:
            return 0
        keys = self.linear_key_heads * self.linear_state_dim
        values = self.linear_value_heads * self.linear_head_dim
        projections = (
            self.hidden_size * (2 * keys + 2 * values + 2 * self.linear_value_heads)
            + values * self.hidden_size
        )
        return (
            projections
            + (2 * keys + values) * self.linear_conv_kernel
            + 2 * self.linear_value_heads
            + self.linear_head_dim
        )

    @functools.cached_property
    def expert_params(self) -> int:
        """One routed expert."""
        return self.mlp_matrices * (self.expert_input_size or self.hidden_size) * self.moe_intermediate_size

    @functools.cached_property
    def routed_params(self) -> int:
        """All routed experts of all layers."""
        return self.num_moe_layers * self.num_experts * self.expert_params

    @functools.cached_property
    def body_params(self) -> int:
        """Everything but embedding, output matrix and routed experts."""
        mixers = self.num_attention_layers * self.attention_params_per_layer
        mixers += self.num_linear_layers * self.linear_params_per_layer
        dense_layers = self.num_mlp_layers - self.num_moe_layers
        mlps = dense_layers * self.mlp_matrices * self.hidden_size * self.intermediate_size
        shared = self.mlp_matrices * self.hidden_size * self.shared_intermediate_size
        latent = 2 * self.hidden_size * self.expert_input_size
        mlps += self.num_moe_layers * (shared + latent + self.hidden_size * self.num_experts)
        num_norms = self.num_attention_layers + self.num_linear_layers + self.num_mlp_layers + 1
        return mixers + mlps + num_norms * self.hidden_size

    @functools.cached_property
    def computed_params(self) -> int:
        """Total from the shapes."""
        ends = self.embedding_params + (0 if self.tie_embeddings else self.head_params)
        return self.body_params + self.routed_params + ends

    @property
    def computed_active_params(self) -> int:
        """What one token passes through, embedding and output matrix included."""
        if not self.num_experts:
            return self.computed_params
        return self.computed_params - self.routed_params + self.active_routed_params

    @functools.cached_property
    def active_routed_params(self) -> int:
        return self.num_moe_layers * self.experts_per_token * self.expert_params

    @property
    def params(self) -> int:
        """Total: the published figure, or what the shapes give."""
        return self.published_params or self.computed_params

    @property
    def active_params(self) -> int:
        """Parameters behind one token: the published figure, or what the shapes give."""
        if not self.num_experts:
            return self.params
        return self.published_active_params or self.computed_active_params

    @functools.cached_property
    def matmul_params(self) -> int:
        """Parameters one token is multiplied by: active ones and the output matrix, not the embedding."""
        return self.body_params + self.active_routed_params + self.head_params

    @property
    def kv_width(self) -> int:
        """Numbers kept per token and attention layer."""
        if self.kv_lora_rank:
            return self.kv_lora_rank + self.qk_rope_head_dim
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)

    def kv_bytes_per_token(self, dtype_bytes: float = 2) -> int:
        """Bytes one more token of context adds, sliding windows not yet full; linear layers add none."""
        return round(self.num_attention_layers * self.kv_width * dtype_bytes)

    def kv_bytes(self, context_tokens: float, dtype_bytes: float = 2) -> float:
        """Bytes of one sequence of `context_tokens`: windows cap their layers, linear layers add their state.

        The recurrent state is float32, linear_value_heads x linear_head_dim x linear_state_dim a layer.
        """
        windowed = self.num_sliding_layers if self.sliding_window else 0
        per_layer = self.kv_width * dtype_bytes
        full = (self.num_attention_layers - windowed) * context_tokens
        capped = windowed * min(context_tokens, self.sliding_window)
        return per_layer * (full + capped) + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """float32 recurrent state of one sequence, all linear layers."""
        return (
            4
            * self.num_linear_layers
            * self.linear_value_heads
            * self.linear_head_dim
            * self.linear_state_dim
        )

    def attention_flops_per_pair(self) -> int:
        """FLOPs of one query against one key in one layer: the score and the weighted value."""
        if self.kv_lora_rank:
            return 2 * self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)
        return 2 * self.num_heads * (self.head_dim + self.v_head_dim)

    def as_json(self) -> dict[str, object]:
        """For `plan --json`: the shape, and what follows from it."""
        shape = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) not in (0, "", (), False)
        }
        return {
            **shape,
            "assumed": list(self.assumed),
            "kind": self.kind,
            "params": self.params,
            "active_params": self.active_params,
            "embedding_params": self.embedding_params,
            "kv_bytes_per_token": self.kv_bytes_per_token(),
        }

    @classmethod
    def from_hf_config(cls, config: str | Path | Mapping[str, Any], name: str = "") -> ModelSpec:
        """Read a Hugging Face `config.json` (a folder, a file, or its dictionary).

        An architecture that is not known is read as a decoder of the Llama family as far as its keys go; what
        that assumed stands in `assumed`.

        Raises:
            ConfigError: unreadable, not a JSON object, or without the sizes that nothing can replace.
        """
        if isinstance(config, Mapping):
            return _spec_from_hf(
                config, name or str(config.get("_name_or_path") or config.get("model_type", "model"))
            )
        path = Path(config)
        if path.is_dir():
            path = path / "config.json"
        try:
            values = json.loads(path.read_text("utf-8-sig"))
        except OSError as error:
            raise ConfigError(
                f"cannot read {path}: {error.strerror}",
                "give a model of the registry, or a folder with config.json",
            ) from error
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}", "give the model's config.json") from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"{path} holds {type(values).__name__}, not an object", "give the model's config.json"
            )
        return _spec_from_hf(values, name or _name_of(values, path.resolve()))


_SIZED = re.compile(r"[A-Za-z].*\d[bmk](?![A-Za-z])", re.IGNORECASE)
_HUB_CACHE = re.compile(r"models--(?:.+?--)?([^/]+)/snapshots/")


def _name_of(config: Mapping[str, Any], path: Path) -> str:
    """The name a person would give the model: its own, else its folder's, else its architecture's."""
    own = str(config.get("_name_or_path") or "").rstrip("/").rsplit("/", 1)[-1]
    if re.search(r"[A-Za-z]", own):
        return own
    if cached := _HUB_CACHE.search(path.as_posix()):
        return cached[1]
    folder, family = path.parent.name, str(config.get("model_type") or "")
    # A model's folder is named after its family or its size; "tmp8f3a_", "model" or "step_40" is not.
    if _SIZED.search(folder) or (family and family in folder.lower()):
        return folder
    listed = config.get("architectures")
    architecture = listed[0] if isinstance(listed, list) and listed else ""
    return str(architecture or family or folder or "model")


_LONGEST_HINT = 200
"""Characters; above that a remedy would list the whole registry."""


def load_model(name_or_path: str) -> ModelSpec:
    """A model by registry name or alias, or from a Hugging Face folder or `config.json`.

    Organisations, remarks in parentheses and endings such as `-Instruct` are ignored: they do not change
    the shape.

    Raises:
        ConfigError: neither a known name (the nearest are named) nor a readable config.
    """
    if not name_or_path.strip():
        raise ConfigError("no model is named", "give a name such as qwen3-8b, or a folder with a config.json")
    spec = _registry().get(_key(name_or_path))
    if spec is not None:
        return spec
    path = Path(name_or_path)
    if path.exists() or path.suffix == ".json":
        return ModelSpec.from_hf_config(path)
    known = model_names(with_aliases=True)
    hint = nearest_name(path.name, known)
    if len(hint) > _LONGEST_HINT:  # nothing is near: not the whole table
        hint = f"give one of {len(known)} names such as qwen3-8b"
    what = (
        f"no folder {name_or_path!r} here, and no such"
        if "/" in name_or_path
        else f"model {name_or_path!r} is not a"
    )
    raise ConfigError(f"{what} name in the registry", f"{hint} (or give a config.json or its folder)")


def model_names(*, with_aliases: bool = False) -> list[str]:
    """Names of the registry."""
    rows = _registry_rows()
    names = {row["name"] for row in rows}
    if with_aliases:
        names |= {alias for row in rows for alias in row.get("aliases", ())}
    return sorted(names)


_ENDINGS = re.compile(
    r"-(instruct|base|chat|it|hf|thinking|bf16|fp8|instruct-\d+|thinking-\d+|v0\.\d|\d{4})$"
)


def _key(name: str) -> str:
    key = re.sub(r"\s*\(.*?\)", "", name).strip().lower().rstrip("/").rsplit("/", 1)[-1]
    key = key.replace("_", "-").replace(" ", "-")
    while (shorter := _ENDINGS.sub("", key)) != key:
        key = shorter
    return re.sub(r"[^a-z0-9.]", "", key.removeprefix("meta-"))


@functools.cache
def hub_name(name: str) -> str:
    """The full name on the hub of what is known by its last part; empty where the registry does not know it.

    >>> hub_name("qwen3-4b"), hub_name("Qwen2.5-7B-Instruct"), hub_name("my-qwen3-4b")
    ('Qwen/Qwen3-4B', 'Qwen/Qwen2.5-7B-Instruct', '')
    """
    names: list[str] = _registry_table()["hub"]
    return next((full for full in names if full.partition("/")[2].lower() == name.lower()), "")


@functools.cache
def _registry_table() -> dict[str, Any]:
    return tomllib.loads((resources.files("rollbook.ledger") / "data" / "models.toml").read_text())


def _registry_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = _registry_table()["model"]
    return rows


@functools.cache
def _registry() -> dict[str, ModelSpec]:
    known: dict[str, ModelSpec] = {}
    for row in _registry_rows():
        shape = {
            k: v
            for k, v in row.items()
            if k not in ("aliases", "notes", "published_params_b", "published_active_params_b")
        }
        spec = ModelSpec(
            **shape,
            published_params=round(row.get("published_params_b", 0) * 1e9),
            published_active_params=round(row.get("published_active_params_b", 0) * 1e9),
        )
        known[_key(spec.name)] = spec
        for alias in row.get("aliases", ()):
            known.setdefault(_key(alias), replace(spec, name=alias))
    return known


_KNOWN_TYPES = {
    "llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_text",
    "qwen3_5_moe", "qwen3_5_moe_text", "mistral", "mixtral", "gemma2", "gemma3",
    "gemma3_text", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe", "gpt_oss", "smollm3", "olmo2", "phi3",
    "granite", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text",
}  # fmt: skip
_BIASED_TYPES = {
    "qwen2", "qwen2_moe", "gpt_oss", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text",
}  # fmt: skip
_QK_NORM_TYPES = {
    "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
    "gemma3", "gemma3_text", "qwen3_vl_text", "qwen3_vl_moe_text",
}  # fmt: skip
_GATED_TYPES = {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}
_TIED_TYPES = {"gemma2", "gemma3", "gemma3_text"}


_STATE_SPACES = re.compile(r"mamba|rwkv|retnet", re.IGNORECASE)
_SHAPES_LAYERS = re.compile(
    r"mamba|ssm|state_size|conv_kernel|recurrent|rwkv|lru|(?<!window_)pattern|_period$|_offset$"
)
"""Keys that make some layers others than attention or experts, in architectures that are not known."""


_ENCODER_TYPES = re.compile(
    r"bert|electra|mpnet|longformer|big_bird|xlnet|clip|^esm|^(t5|umt5|mt5)encoder", re.IGNORECASE
)
_ENCODER_HEADS = re.compile(
    r"For(MaskedLM|PreTraining|TokenClassification|QuestionAnswering|MultipleChoice)$"
)
_OTHER_HEADS = re.compile(r"For(SequenceClassification|Score|Reward)|RewardModel|^(?!.*For).*Model$")
"""Of decoders that judge or embed."""


def _heads(config: Mapping[str, Any]) -> list[str]:
    listed = config.get("architectures")
    return [str(head) for head in listed] if isinstance(listed, list) else []


def _is_encoder(config: Mapping[str, Any]) -> bool:
    """Every token sees those after it, so nothing is generated token by token."""
    if config.get("is_decoder") or any(head.endswith("ForCausalLM") for head in _heads(config)):
        return False
    is_named = bool(_ENCODER_TYPES.search(str(config.get("model_type", ""))))
    return is_named or any(_ENCODER_HEADS.search(head) for head in _heads(config))


def _parts_not_counted(config: Mapping[str, Any]) -> list[str]:
    """What stands around the decoder that is read, in words."""
    towers = [key for key in ("vision_config", "audio_config") if config.get(key)]
    notes = [f"{key} is not read: the plan is of the language model alone" for key in towers]
    heads = [head for head in _heads(config) if _OTHER_HEADS.search(head)]
    return notes + [
        f"{head} has no output matrix to sample from: taken as the decoder under it" for head in heads
    ]


def _spec_from_hf(config: Mapping[str, Any], name: str) -> ModelSpec:
    assumed = _parts_not_counted(config)
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**{k: v for k, v in config.items() if k not in text}, **text}
    model_type = str(config.get("model_type", ""))
    if config.get("is_encoder_decoder"):
        raise ConfigError(
            f"{name}: config.json is of an encoder-decoder ({model_type or 'without model_type'})",
            "give a decoder-only language model's config.json",
        )
    if model_type not in _KNOWN_TYPES:
        assumed.append(
            f"architecture {model_type or 'without model_type'!r} is not known: read as a Llama-style "
            f"decoder with gated feed-forwards"
        )
        unread = sorted(key for key, value in config.items() if value and _SHAPES_LAYERS.search(key))
        if unread:
            assumed.append(f"its layers are taken to be alike: not read are {', '.join(unread)}")
    absent = [
        k
        for k in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
        if not config.get(k)
    ]
    if absent:
        said = [k if config.get(k) is None else f"{k} above {config[k]!r}" for k in absent]
        remedy = "give a decoder-only language model's config.json"
        if _STATE_SPACES.search(model_type) or any(_STATE_SPACES.search(head) for head in _heads(config)):
            remedy = (
                "a model of state-space layers alone has no attention to plan for: give one that mixes both, such as "
                "Nemotron-3-Nano, or a transformer of its size"
            )
        raise ConfigError(f"{name}: config.json has no {', '.join(said)}", remedy)

    def count(*keys: str) -> int:
        key, value = next(((k, config[k]) for k in keys if config.get(k) is not None), (keys[0], 0))
        numbers = value if isinstance(value, list) else [value]
        if not all(_is_count(n) for n in numbers):
            raise ConfigError(f"{name}: {key} is {value!r} in config.json", "give a count of 0 or more")
        return int(sum(numbers))

    num_layers = count("num_hidden_layers")
    num_experts = count("num_experts", "n_routed_experts", "num_local_experts")
    moe_width = count("moe_intermediate_size", "intermediate_size") if num_experts else 0
    experts_per_token = count("num_experts_per_tok", "moe_topk") if num_experts else 0
    if experts_per_token > num_experts:
        raise ConfigError(
            f"{name}: {experts_per_token} experts a token of {num_experts} in config.json",
            "give at most as many as there are",
        )
    num_heads, num_kv_heads = count("num_attention_heads"), count("num_key_value_heads")
    if num_kv_heads and num_heads % num_kv_heads and "kv_lora_rank" not in config:
        raise ConfigError(
            f"{name}: {num_heads} attention heads in {num_kv_heads} key-value heads in config.json",
            "give a number of key-value heads that divides the attention heads",
        )
    layer_types = [str(t) for t in _listed(config, "layer_types")]
    if 0 < len(layer_types) < num_layers:  # longer where layers that predict further tokens are listed, too
        raise ConfigError(
            f"{name}: {num_layers} layers and {len(layer_types)} layer_types in config.json",
            "give the type of each layer",
        )
    if others := sorted({t for t in layer_types if "attention" not in t}):
        assumed.append(f"layers of the type {', '.join(others)} are taken as attention")
    if "num_key_value_heads" not in config and not config.get("kv_lora_rank"):
        assumed.append("num_key_value_heads is absent: as many as attention heads")
    if not config.get("intermediate_size") and not num_experts:
        assumed.append("intermediate_size is absent: 4 x hidden_size")
    num_linear = _num_linear_layers(config, model_type, layer_types, num_layers)
    num_sliding = _num_sliding_layers(config, model_type, layer_types, num_layers)
    tied_by_default = model_type in _TIED_TYPES
    return ModelSpec(
        name=name,
        num_layers=num_layers,
        hidden_size=count("hidden_size"),
        vocab_size=count("vocab_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=count("head_dim") or count("qk_nope_head_dim") + count("qk_rope_head_dim"),
        intermediate_size=count("intermediate_size") or 4 * count("hidden_size"),
        tie_embeddings=bool(config.get("tie_word_embeddings", tied_by_default)),
        qkv_bias=bool(config.get("attention_bias", model_type in _BIASED_TYPES)),
        qk_norm=model_type in _QK_NORM_TYPES or bool(config.get("use_qk_norm")),
        has_attention_gate=model_type in _GATED_TYPES,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        moe_intermediate_size=moe_width,
        shared_intermediate_size=(
            count("shared_expert_intermediate_size")
            or count("n_shared_experts", "num_shared_experts") * moe_width
        ),
        num_dense_layers=_num_dense_layers(config, num_layers) if num_experts else 0,
        kv_lora_rank=count("kv_lora_rank"),
        q_lora_rank=count("q_lora_rank"),
        qk_nope_head_dim=count("qk_nope_head_dim"),
        qk_rope_head_dim=count("qk_rope_head_dim") if config.get("kv_lora_rank") else 0,
        v_head_dim=count("v_head_dim"),
        sliding_window=count("sliding_window") if num_sliding else 0,
        num_sliding_layers=num_sliding,
        num_linear_layers=num_linear,
        linear_key_heads=count("linear_num_key_heads") if num_linear else 0,
        linear_value_heads=count("linear_num_value_heads") if num_linear else 0,
        linear_head_dim=count("linear_value_head_dim") if num_linear else 0,
        linear_state_dim=count("linear_key_head_dim") if num_linear else 0,
        linear_conv_kernel=count("linear_conv_kernel_dim") if num_linear else 0,
        max_context_tokens=count("max_position_embeddings"),
        is_encoder=_is_encoder(config),
        assumed=tuple(assumed),
        source="config.json",
    )


def _is_count(value: object) -> bool:
    return not isinstance(value, bool) and (
        isinstance(value, int | float) and 0 <= value <= MOST_COUNT and value == int(value)
    )


def _listed(config: Mapping[str, Any], key: str) -> list[Any]:
    """A list of a config.json, empty where it is absent or null."""
    value = config.get(key) or []
    if not isinstance(value, list):
        raise ConfigError(f"{key} is {value!r} in config.json", "give a list, or leave it out")
    return value


def _positive(config: Mapping[str, Any], key: str, default: int) -> int:
    """A count of a config.json, the default where it is absent, null or 0."""
    value = config.get(key) or default
    if not _is_count(value):
        raise ConfigError(f"{key} is {value!r} in config.json", "give a count of 0 or more")
    return int(value)


def _num_linear_layers(
    config: Mapping[str, Any], model_type: str, layer_types: Iterable[str], num_layers: int
) -> int:
    listed = sum("linear" in t for t in layer_types)
    if listed or model_type not in _GATED_TYPES:
        return listed
    interval = _positive(config, "full_attention_interval", 4)
    return num_layers - num_layers // interval


def _num_sliding_layers(
    config: Mapping[str, Any], model_type: str, layer_types: list[str], num_layers: int
) -> int:
    if not config.get("sliding_window"):
        return 0
    if layer_types:
        return sum("sliding" in t for t in layer_types)
    if "use_sliding_window" in config and not config["use_sliding_window"]:
        return 0
    if model_type.startswith("gemma3"):
        return num_layers - num_layers // _positive(config, "sliding_window_pattern", 6)
    return num_layers // 2 if model_type in ("gemma2", "gpt_oss") else num_layers


def _num_dense_layers(config: Mapping[str, Any], num_layers: int) -> int:
    dense = _positive(config, "first_k_dense_replace", 0)
    if not dense and (step := _positive(config, "decoder_sparse_step", 1)) > 1:
        return num_layers - num_layers // step
    return max(dense, len(_listed(config, "mlp_only_layers")))
