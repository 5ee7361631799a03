"""From `[model]` to a model that computes: made on the spot, read from a folder, or found on the hub.

Sampling settings beside a checkpoint (generation_config.json) are never read: what samples is always written
down in the run's own config.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollbook.errors import ConfigError
from rollbook.modeling.attention import ATTENTIONS, packed_layout
from rollbook.modeling.char_tokenizer import CharTokenizer, saved_alphabet
from rollbook.modeling.config import LoraConfig, ModelConfig, NewModelConfig, is_local_path
from rollbook.modeling.decoder import Decoder, DecoderConfig, read_config, unsupported_because, write_config
from rollbook.modeling.logprobs import LmHead
from rollbook.modeling.lora import adapter_tensors, add_adapters, computing_with, exported
from rollbook.modeling.tokenizer import HubTokenizer, Tokenizer, load_inner

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What an engine, the packer and the checks need to know about an architecture."""

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    """Rows of the embedding; a tokenizer may use fewer."""
    max_position: int
    """Most tokens of a sequence."""
    sliding_windows: tuple[int | None, ...]
    """One entry a layer."""
    tie_embeddings: bool
    num_experts: int = 1
    """Of a mixture's layer; 1 for a dense model."""
    eos_ids: tuple[int, ...] = ()
    """From config.json; the tokenizer adds its own."""


@dataclass(slots=True, kw_only=True)
class LoadedModel:
    """A causal language model behind one face, whether built in or from transformers."""

    module: nn.Module
    """Decoder or a transformers PreTrainedModel. Its parameters are the live weights."""
    facts: ModelFacts
    tokenizer: Tokenizer | None
    source: str
    """Where the weights came from, for messages."""
    entry: nn.Module | None = None
    """What gives hidden states where parameters are divided among ranks (`trainer/parallel.py`)."""
    compute_dtype: torch.dtype | None = None
    """Of forward and backward, where it is not that of the parameters."""
    lora: LoraConfig | None = None
    """Set where layers have adapters (`modeling/lora.py`)."""
    stand_ins: Mapping[str, Tensor] | None = None
    """Adapters of a reference, by name: it computes with them, on the policy's own base."""

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """In which the model computes."""
        return self.compute_dtype or next(self.module.parameters()).dtype

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, **attention: Any) -> Tensor:
        """[B, T, hidden] after the last norm, from [B, T] ids and positions; `attention` goes to its function."""
        arguments = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False, **attention}
        module: Any = self.module
        with nullcontext() if self.stand_ins is None else computing_with(module, self.stand_ins):
            hidden: Tensor = (
                module.base_model(**arguments).last_hidden_state
                if self.entry is None
                else self.entry(**arguments)
            )
        return hidden

    def lm_head(self) -> LmHead:
        """The output layer over the live weights."""
        module: Any = self.module
        layer = module.get_output_embeddings()
        scale = float(getattr(module.config, "logit_scale", None) or 1.0)
        scale /= float(getattr(module.config, "logits_scaling", None) or 1.0)
        softcap = getattr(module.config, "final_logit_softcapping", None)
        return LmHead(layer.weight, getattr(layer, "bias", None), softcap, scale)

    def hf_config(self) -> dict[str, Any]:
        """The facts of config.json."""
        if isinstance(self.module, Decoder):
            return write_config(self.module.config)
        config: Any = self.module.config
        return dict(config.to_dict())

    def named_tensors(self) -> dict[str, Tensor]:
        """Live parameters (and saved buffers) by Hugging Face name; a tied tensor appears once. Of a reference that
        shares its base: its adapters."""
        if self.stand_ins is not None:
            return dict(self.stand_ins)
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                tensors[name] = tensor
        return tensors

    def published_shapes(self) -> dict[str, torch.Size]:
        """What a publication carries, by name."""
        tensors = self.named_tensors()
        if self.lora is None:
            return {name: tensor.shape for name, tensor in tensors.items()}
        wants_adapters = self.lora.publish == "adapter"
        adapters = adapter_tensors(self)
        return {name: t.shape for name, t in tensors.items() if (name in adapters) == wants_adapters}

    def published_tensors(self, dtype: torch.dtype, *, whole: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `published_shapes`, in that order; the live ones where nothing must be converted or merged.

        Args:
            whole: merge adapters, whatever is published: a model for readers that know none.
        """
        if self.lora is not None:
            yield from exported(self, dtype, merge=whole or self.lora.publish == "merged")
            return
        for name, tensor in self.named_tensors().items():
            yield name, tensor.detach().to(dtype)

    def set_attention(self, name: str) -> None:
        """Use the attention function of this name, a key of ATTENTIONS, from here on."""
        module: Any = self.module
        if not isinstance(module, Decoder):
            _register_with_transformers(name)
        module.set_attn_implementation(name)

    def enable_gradient_checkpointing(self) -> None:
        """Keep only the layers' inputs for the backward pass and compute the rest again."""
        module: Any = self.module
        module.train()  # transformers checkpoints in training mode alone; no layer here has dropout
        module.gradient_checkpointing_enable()

    def save(self, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """A folder that transformers and the engines load. `tensors` replace the live weights, by name."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {n: t.detach().cpu().contiguous() for n, t in (tensors or self.named_tensors()).items()}
        if isinstance(self.module, Decoder):
            from safetensors.torch import save_file

            self.save_config(folder, str(next(iter(weights.values())).dtype).removeprefix("torch."))
            save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        else:
            self.module.save_pretrained(folder, state_dict=weights)  # type: ignore[operator]
        if self.tokenizer is not None:
            self.tokenizer.save(folder)

    def save_config(self, folder: Path, dtype: str) -> None:
        """config.json alone, for an engine whose weights come by a publication."""
        if not isinstance(self.module, Decoder):
            module: Any = self.module
            module.config.save_pretrained(folder)
            return
        config = write_config(self.module.config) | {"dtype": dtype}
        if self.tokenizer is not None:
            eos = self.tokenizer.eos_ids
            config.setdefault("bos_token_id", self.tokenizer.bos_id)
            config.setdefault("eos_token_id", list(eos) if len(eos) > 1 else eos[0] if eos else None)
            config.setdefault("pad_token_id", self.tokenizer.pad_id)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_model(
    config: ModelConfig,
    *,
    attention: str = "rollbook_packed",
    dtype: str | None = None,
    device: str | None = None,
    with_tokenizer: bool = True,
) -> LoadedModel:
    """Make or load the model of `config`.

    Args:
        config: the `[model]` section.
        attention: a key of ATTENTIONS.
        dtype: of the parameters; None: `config.dtype`. The trainer asks for float32 master weights.
        device: None: `config.device`.
        with_tokenizer: False skips it (a second copy of the same model).
    Raises:
        ConfigError: nothing there, unreadable, incomplete, or tokenizer and weights do not fit each other.
    """
    target = torch.device(device or config.device)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"model.device is {str(target)!r} and torch sees no CUDA device", 'use device = "cpu"'
        )
    torch_dtype = DTYPES[dtype or config.dtype]
    if config.new is not None:
        model = _new_model(config.new, config.seed)
        model.module.to(device=target, dtype=torch_dtype)
        return _finished(model, config, attention)
    assert config.path is not None
    folder = _folder(config)
    source = _read_json(folder / "config.json", config.path)
    reason = unsupported_because(source)
    if reason and config.implementation == "rollbook":
        raise ConfigError(
            f"the built-in decoder cannot run {config.path}: {reason}", 'set model.implementation = "auto"'
        )
    has_safetensors = (folder / WEIGHTS).is_file() or (folder / INDEX).is_file()
    if reason or config.implementation == "transformers" or not has_safetensors:
        model = _load_transformers(config, folder, source, attention, torch_dtype, target)
    else:
        model = _load_builtin(read_config(source), folder, config.path, torch_dtype, target)
    if with_tokenizer:
        model.tokenizer = load_tokenizer(config, folder, model.facts)
    return _finished(model, config, attention)


def _finished(model: LoadedModel, config: ModelConfig, attention: str) -> LoadedModel:
    model.set_attention(attention)
    if config.lora is not None:
        add_adapters(model, config.lora, base_dtype=DTYPES[config.dtype], seed=config.seed)
    return model


def wrap_transformers(module: nn.Module) -> LoadedModel:
    """A transformers causal LM made elsewhere, behind the same face."""
    facts = _facts(module.config)
    return LoadedModel(module=module, facts=facts, tokenizer=None, source="a transformers model")


def load_tokenizer(
    config: ModelConfig, folder: Path | None = None, facts: ModelFacts | None = None
) -> Tokenizer:
    """The tokenizer alone. With `facts`, ids beyond the embedding are a ConfigError."""
    if config.new is not None and config.tokenizer_path is None:
        return CharTokenizer(config.new.alphabet)
    name = config.tokenizer_path or config.path
    assert name is not None
    if config.tokenizer_path is not None or folder is None:
        folder = Path(name) if Path(name).is_dir() else None
    alphabet = saved_alphabet(folder) if folder is not None else None
    eos_ids = facts.eos_ids if facts is not None else ()
    tokenizer: Tokenizer
    if alphabet is not None:
        tokenizer = CharTokenizer(alphabet)
    else:
        try:
            inner = load_inner(
                str(folder or name), revision=config.revision, trust_remote_code=config.trust_remote_code
            )
        except Exception as error:  # the libraries below raise many kinds
            raise ConfigError(
                f"no tokenizer could be loaded from {name}: {_first_line(error)}",
                "put the tokenizer's files beside the model, or set model.tokenizer_path",
            ) from None
        vocab = inner.get_vocab()
        # What transformers makes of a folder without its files.
        if not set(vocab) - set(inner.all_special_tokens):
            raise ConfigError(
                f"the tokenizer of {name} knows no text: its vocabulary holds {len(vocab)} special tokens and nothing "
                "else, as if tokenizer.json were missing",
                "put the tokenizer's files beside the model, or set model.tokenizer_path",
            )
        tokenizer = HubTokenizer(inner, eos_ids)
    if facts is not None and tokenizer.vocab_size > facts.vocab_size:
        raise ConfigError(
            f"the tokenizer of {name} has ids up to {tokenizer.vocab_size - 1} and the model's embedding "
            f"{facts.vocab_size} rows",
            "use the tokenizer that belongs to the model (model.tokenizer_path)",
        )
    return tokenizer


def _new_model(new: NewModelConfig, seed: int) -> LoadedModel:
    tokenizer = CharTokenizer(new.alphabet)
    vocab_size = new.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.new.vocab_size is {vocab_size} and the tokenizer has {tokenizer.vocab_size} tokens",
            "leave vocab_size empty or make it larger",
        )
    decoder_config = DecoderConfig(
        model_type=new.architecture,
        vocab_size=vocab_size,
        hidden_size=new.hidden_size,
        intermediate_size=new.intermediate_size,
        num_hidden_layers=new.num_layers,
        num_attention_heads=new.num_heads,
        num_key_value_heads=new.num_kv_heads or new.num_heads,
        head_dim=new.head_dim or new.hidden_size // new.num_heads,
        max_position_embeddings=new.max_position,
        rope_theta=new.rope_theta,
        tie_word_embeddings=new.tie_embeddings,
        sliding_windows=(None,) * new.num_layers,
        eos_token_id=tokenizer.eos_ids[0],
        qkv_bias=new.architecture == "qwen2",
        qk_norm=new.architecture == "qwen3",
        initializer_range=new.initializer_range,
    )
    module = Decoder(decoder_config)
    module.initialize(seed)
    return LoadedModel(module=module, facts=_facts(decoder_config), tokenizer=tokenizer, source="model.new")


def _load_builtin(
    config: DecoderConfig, folder: Path, name: str, dtype: torch.dtype, device: torch.device
) -> LoadedModel:
    with torch.device("meta"):
        module = Decoder(config)
    wanted = dict(module.named_parameters())
    found: dict[str, nn.Parameter] = {}
    unexpected: list[str] = []
    for key, tensor in _read_safetensors(folder, name):
        if key in wanted:
            if tensor.shape != wanted[key].shape:
                raise ConfigError(
                    f"{key} in {name} has shape {list(tensor.shape)}, config.json says {list(wanted[key].shape)}",
                    "config.json and weights belong to different models: download both again",
                )
            found[key] = nn.Parameter(tensor.to(device=device, dtype=dtype))
        elif not (
            key.endswith("rotary_emb.inv_freq") or (key == "lm_head.weight" and config.tie_word_embeddings)
        ):
            unexpected.append(key)
    missing = sorted(set(wanted) - set(found))
    if missing or unexpected:
        what = (
            f"lack {len(missing)} tensors, first {missing[0]}"
            if missing
            else f"hold an unknown {unexpected[0]}"
        )
        raise ConfigError(f"the weights in {name} {what}", 'try model.implementation = "transformers"')
    for key, parameter in found.items():
        owner, _, attribute = key.rpartition(".")
        setattr(module.get_submodule(owner), attribute, parameter)
    if config.tie_word_embeddings:
        module.lm_head.weight = module.model.embed_tokens.weight
    return LoadedModel(module=module, facts=_facts(config), tokenizer=None, source=name)


def _load_transformers(
    config: ModelConfig,
    folder: Path,
    source: Mapping[str, Any],
    attention: str,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedModel:
    if source.get("auto_map") and not config.trust_remote_code:
        raise ConfigError(
            f"{config.path} comes with its own Python code",
            "read it, then set model.trust_remote_code = true",
        )
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise ConfigError(
            f"{config.path} holds config.json and no weights (*.safetensors)",
            "copy or download the weights too",
        )
    if (folder / INDEX).is_file():
        _shards(folder, str(config.path))
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.utils.logging.disable_progress_bar()  # the run has a view of its own
    _register_with_transformers(attention)
    try:
        module = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
        )
    except Exception as error:  # the libraries below raise many kinds
        raise ConfigError(
            f"transformers cannot load {config.path}: {_first_line(error)}",
            "check that it is a causal language model and that the files are complete",
        ) from None
    module.to(device)
    module.eval()
    model = LoadedModel(module=module, facts=_facts(module.config), tokenizer=None, source=str(config.path))
    _check_lm_head(model)
    return model


def _check_lm_head(model: LoadedModel) -> None:
    """Our head must give the model's own logits: some architectures scale or cap them in ways of their own."""
    ids = torch.arange(4, device=model.device)[None] % model.facts.vocab_size
    attention = {"packed": packed_layout([0, 4], model.device)}
    module: Any = model.module
    with torch.no_grad():
        model.set_attention("rollbook_packed")
        hidden = model.hidden_states(ids, torch.arange(4, device=model.device)[None], **attention)
        ours = model.lm_head().logits(hidden[0])
        theirs = module(input_ids=ids, use_cache=False, **attention).logits[0]
    if not torch.allclose(ours.float(), theirs.float(), rtol=1e-3, atol=1e-3):
        raise ConfigError(
            f"{model.source} computes its logits in a way of its own (off by {(ours - theirs).abs().max():.3g})",
            "this architecture cannot be trained yet: report its model_type",
        )


def _register_with_transformers(name: str) -> None:
    from transformers import AttentionInterface

    if name in ATTENTIONS:
        AttentionInterface.register(name, ATTENTIONS[name])


def _facts(config: Any) -> ModelFacts:
    """From a DecoderConfig or a transformers config."""
    text = config.get_text_config()
    num_layers, num_heads = int(text.num_hidden_layers), int(text.num_attention_heads)
    windows = getattr(text, "sliding_windows", None)
    if windows is None:
        window = getattr(text, "sliding_window", None)
        layer_types = getattr(text, "layer_types", None) or ["sliding_attention"] * num_layers
        windows = tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    return ModelFacts(
        model_type=str(text.model_type),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(getattr(text, "num_key_value_heads", None) or num_heads),
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // num_heads),
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        max_position=int(text.max_position_embeddings),
        sliding_windows=windows,
        tie_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        num_experts=int(getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1),
        eos_ids=_eos_ids(text.eos_token_id),
    )


def _eos_ids(given: int | list[int] | None) -> tuple[int, ...]:
    if given is None:
        return ()
    return tuple(int(i) for i in given) if isinstance(given, list) else (int(given),)


def _folder(config: ModelConfig) -> Path:
    """The local folder of `config.path`, downloaded when it is a hub name."""
    assert config.path is not None
    path = Path(config.path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} has no config.json", "point model.path at a Hugging Face model folder")
        return path
    if path.exists() or is_local_path(config.path):
        what = "is not a folder" if path.exists() else f"does not exist (seen from {Path.cwd()})"
        raise ConfigError(
            f"model.path {config.path!r} {what}", "give a Hugging Face model folder or a hub name"
        )
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(config.path, revision=config.revision, allow_patterns=patterns))
    except Exception as error:  # network, authorization and naming errors of the hub client
        raise ConfigError(
            f"model.path {config.path!r} is no folder (seen from {Path.cwd()}), and as a model of the Hugging Face hub "
            + _hub_problem(error),
            "give the path of a model folder, or check the hub name; without a network, download the model first",
        ) from None


def _hub_problem(error: Exception) -> str:
    """Why the hub gave no model, in words; its client's own chain ends in "Got: ConnectError" and the like."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "it may not be read with this login (gated)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "it does not exist, or is private"
    if isinstance(error, errors.RevisionNotFoundError):
        return "it has no such model.revision"
    if isinstance(error, errors.HFValidationError):
        return f"its name is not valid ({_first_line(error)})"
    if isinstance(error, errors.LocalEntryNotFoundError | ConnectionError | TimeoutError):
        return "it cannot be reached (no network, or offline mode) and is not in the local cache"
    return f"it cannot be read: {_first_line(error)}"


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path.name} of {name} cannot be read: {_first_line(error)}", "restore the file"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path.name} of {name} is not a JSON object", "restore the file")
    return content


def _shards(folder: Path, name: str) -> list[Path]:
    if not (folder / INDEX).is_file():
        return [folder / WEIGHTS]
    names = sorted(set(_read_json(folder / INDEX, name).get("weight_map", {}).values()))
    missing = [shard for shard in names if not (folder / shard).is_file()]
    if missing:
        raise ConfigError(
            f"{len(missing)} of {len(names)} weight files of {name} are missing, first {missing[0]}",
            "copy or download them again",
        )
    return [folder / shard for shard in names]


def _read_safetensors(folder: Path, name: str) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    for shard in _shards(folder, name):
        try:
            with safe_open(shard, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a mapping)
                    yield key, file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{shard.name} of {name} cannot be read: {_first_line(error)}", "copy or download it again"
            ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
