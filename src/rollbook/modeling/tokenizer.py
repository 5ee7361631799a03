"""The tokenizer as the rest of rollbook sees it.

Tokens cross the engine's boundary, text does not: only prompt files, rewards and environments come here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rollbook.types import Ids

Message = Mapping[str, Any]
"""One chat message: at least "role" and "content"."""


class Tokenizer(Protocol):
    """Text to ids and back."""

    pad_id: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    """Every id that ends a response."""
    vocab_size: int
    """Largest id + 1."""
    has_chat_template: bool

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Ids:
        """[n] int32; `add_special_tokens` adds what the model expects around a document (often a first token)."""

    def decode(self, ids: Ids | Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def encode_chat(self, messages: Sequence[Message]) -> Ids:
        """[n] int32: the messages by the chat template, ending where the assistant's answer begins."""

    def save(self, folder: Path) -> None:
        """Files that Hugging Face's AutoTokenizer reads."""


DIRECT_CLASSES = {
    ("llama", "TokenizersBackend"): "PreTrainedTokenizerFast",
    ("llama", "PreTrainedTokenizerFast"): "PreTrainedTokenizerFast",
    ("llama", "GPT2Tokenizer"): "GPT2Tokenizer",
    ("llama", "GPT2TokenizerFast"): "GPT2Tokenizer",
    ("qwen2", "Qwen2Tokenizer"): "Qwen2Tokenizer",
    ("qwen2", "Qwen2TokenizerFast"): "Qwen2Tokenizer",
    ("qwen3", "Qwen2Tokenizer"): "Qwen2Tokenizer",
    ("qwen3", "Qwen2TokenizerFast"): "Qwen2Tokenizer",
}
"""(model_type, tokenizer_class) as written beside a model -> the class of transformers that AutoTokenizer would
choose. Importing AutoTokenizer loads all model code and torch's compiler: 2 to 3 seconds and 110 MiB."""


def load_inner(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The transformers tokenizer of a local folder or hub name; raises whatever that library raises."""
    direct = _direct_class(Path(name))
    if direct is not None:
        import transformers

        return getattr(transformers, direct).from_pretrained(name)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)


def _direct_class(folder: Path) -> str | None:
    """Name of the class in DIRECT_CLASSES for a complete local folder; None: AutoTokenizer must decide."""
    parts = [folder / part for part in ("config.json", "tokenizer_config.json", "tokenizer.json")]
    if not all(part.is_file() for part in parts):
        return None
    try:
        model, own = (json.loads(part.read_text(encoding="utf-8")) for part in parts[:2])
    except (OSError, ValueError):
        return None  # AutoTokenizer says what is wrong
    if not isinstance(model, dict) or not isinstance(own, dict) or "auto_map" in own:
        return None
    return DIRECT_CLASSES.get((str(model.get("model_type")), str(own.get("tokenizer_class"))))


class HubTokenizer:
    """A tokenizer of the transformers library."""

    def __init__(self, inner: Any, eos_ids: Sequence[int] = ()) -> None:
        self.inner = inner
        own = [] if inner.eos_token_id is None else [int(inner.eos_token_id)]
        self.eos_ids = tuple(dict.fromkeys([*own, *eos_ids]))
        self.bos_id: int | None = inner.bos_token_id
        fallback = self.eos_ids[0] if self.eos_ids else 0
        self.pad_id = int(inner.pad_token_id if inner.pad_token_id is not None else fallback)
        self.vocab_size = max(inner.get_vocab().values()) + 1
        self.has_chat_template = bool(inner.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Ids:
        return np.asarray(self.inner.encode(text, add_special_tokens=add_special_tokens), np.int32)

    def decode(self, ids: Ids | Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self.inner.decode(np.asarray(ids).tolist(), skip_special_tokens=skip_special_tokens))

    def encode_chat(self, messages: Sequence[Message]) -> Ids:
        text = self.inner.apply_chat_template(
            [dict(m) for m in messages], add_generation_prompt=True, tokenize=False
        )
        return np.asarray(self.inner.encode(text, add_special_tokens=False), np.int32)

    def save(self, folder: Path) -> None:
        self.inner.save_pretrained(folder)
