"""The character tokenizer, its twin in transformers, and prompts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rollbook.errors import DataError
from rollbook.modeling.char_tokenizer import SPECIAL_TOKENS, CharTokenizer
from rollbook.modeling.config import ModelConfig
from rollbook.modeling.load import load_tokenizer
from rollbook.modeling.tokenizer import DIRECT_CLASSES, HubTokenizer, load_inner

ALPHABET = "0123456789+= \nab<>"
CHAT = [
    {"role": "system", "content": "a b"},
    {"role": "user", "content": "12+3=\n<"},
    {"role": "assistant", "content": "15"},
    {"role": "user", "content": "a"},
]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> HubTokenizer:
    folder = tmp_path_factory.mktemp("characters")
    CharTokenizer(ALPHABET).save(folder)
    inner = AutoTokenizer.from_pretrained(folder)
    assert isinstance(inner, PreTrainedTokenizerFast)
    return HubTokenizer(inner)


@pytest.mark.parametrize("text", ["", "12+3=15", " a\n\n b ", "<>0"])
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_saved_tokenizer_gives_the_same_ids_and_text(
    twin: HubTokenizer, text: str, add_special_tokens: bool
) -> None:
    ours = CharTokenizer(ALPHABET)
    ids = ours.encode(text, add_special_tokens=add_special_tokens)
    assert ids.dtype == np.int32
    assert ids.tolist() == twin.encode(text, add_special_tokens=add_special_tokens).tolist()
    assert ours.decode(ids) == text == twin.decode(ids)


def test_saved_chat_template_gives_the_same_ids(twin: HubTokenizer) -> None:
    assert CharTokenizer(ALPHABET).encode_chat(CHAT).tolist() == twin.encode_chat(CHAT).tolist()


def test_special_ids_are_the_same(twin: HubTokenizer) -> None:
    ours = CharTokenizer(ALPHABET)
    assert (
        (ours.pad_id, ours.bos_id, ours.eos_ids) == (twin.pad_id, twin.bos_id, twin.eos_ids) == (0, 1, (2,))
    )
    assert ours.vocab_size == twin.vocab_size == len(SPECIAL_TOKENS) + len(ALPHABET)


def test_a_saved_character_tokenizer_is_read_back_without_transformers(tmp_path: Path) -> None:
    CharTokenizer(ALPHABET).save(tmp_path)
    again = load_tokenizer(ModelConfig(path="unused", tokenizer_path=str(tmp_path)))
    assert isinstance(again, CharTokenizer)
    assert again.alphabet == ALPHABET


def test_spelled_out_special_tokens_in_a_text_stay_text() -> None:
    """A user's message that spells <assistant> must not start an assistant's turn."""
    tokenizer = CharTokenizer("<>asitn")
    ids = tokenizer.encode_chat([{"role": "user", "content": "<assistant>"}])
    assert ids.tolist().count(SPECIAL_TOKENS.index("<assistant>")) == 1


def test_unknown_characters_and_roles_are_named() -> None:
    with pytest.raises(DataError, match="'xy'"):
        CharTokenizer(ALPHABET).encode("1x2y")
    with pytest.raises(DataError, match="'robot'"):
        CharTokenizer(ALPHABET).encode_chat([{"role": "robot", "content": "a"}])


def test_a_document_begins_with_the_first_token() -> None:
    ids = CharTokenizer(ALPHABET).encode("1", add_special_tokens=True)
    assert ids.tolist() == [1, len(SPECIAL_TOKENS) + 1]


def _write_byte_level(folder: Path, model_type: str, tokenizer_class: str) -> None:
    """A byte-level tokenizer with a few merges, a first token and a chat template, as such models come."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|begin|>", "<|end|>", *alphabet, "he", "ll", "hell", "Ġa"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "a")]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|begin|>", "<|end|>"])
    inner.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    inner.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": tokenizer_class, "bos_token": "<|begin|>", "eos_token": "<|end|>"}
    settings["chat_template"] = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


@pytest.mark.parametrize(("model_type", "tokenizer_class"), DIRECT_CLASSES)
def test_a_class_loaded_directly_is_the_one_autotokenizer_chooses(
    tmp_path: Path, model_type: str, tokenizer_class: str
) -> None:
    _write_byte_level(tmp_path, model_type, tokenizer_class)
    ours = load_inner(str(tmp_path))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    one, other = HubTokenizer(ours), HubTokenizer(theirs)
    text = "hello a\n <|end|>é"
    for add_special_tokens in (False, True):
        ids = one.encode(text, add_special_tokens=add_special_tokens)
        assert ids.tolist() == other.encode(text, add_special_tokens=add_special_tokens).tolist()
        assert one.decode(ids) == other.decode(ids)
    assert one.encode_chat(CHAT).tolist() == other.encode_chat(CHAT).tolist()
