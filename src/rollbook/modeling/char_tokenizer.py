"""A tokenizer with one token for each character, made on the spot and saved in Hugging Face's format.

It needs the `tokenizers` library alone, so that a run of a tiny model starts without importing transformers;
what it saves is read by AutoTokenizer with the same ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from rollbook.errors import ConfigError, DataError
from rollbook.modeling.tokenizer import Message
from rollbook.types import Ids

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS = (PAD, BOS, EOS, UNKNOWN, *(f"<{role}>" for role in ROLES))
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


class CharTokenizer:
    """See the module. Ids: special tokens first, in the order of SPECIAL_TOKENS, then the alphabet."""

    def __init__(self, alphabet: str) -> None:
        self.alphabet = alphabet
        tokens = [*SPECIAL_TOKENS, *alphabet]
        self._ids = {token: i for i, token in enumerate(tokens)}
        self._tokens = tokens
        self.pad_id = self._ids[PAD]
        self.bos_id: int | None = self._ids[BOS]
        self.eos_ids: tuple[int, ...] = (self._ids[EOS],)
        self.vocab_size = len(tokens)
        self.has_chat_template = True

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Ids:
        ids = [self._ids[BOS]] if add_special_tokens else []
        try:
            ids += [self._ids[c] for c in text]
        except KeyError:
            unknown = sorted({c for c in text if c not in self._ids})
            raise DataError(
                f"the character tokenizer does not know {''.join(unknown)!r} in {text[:80]!r}",
                "add the characters to model.new.alphabet, or change the text",
            ) from None
        return np.asarray(ids, np.int32)

    def decode(self, ids: Ids | Sequence[int], *, skip_special_tokens: bool = True) -> str:
        first = len(SPECIAL_TOKENS) if skip_special_tokens else 0
        return "".join(self._tokens[i] for i in ids if first <= i < len(self._tokens))

    def encode_chat(self, messages: Sequence[Message]) -> Ids:
        """[n] int32, as CHAT_TEMPLATE renders them; a role's token is special, its spelling in a text is not."""
        ids = [self._ids[BOS]]
        for message in messages:
            role = str(message["role"])
            if role not in ROLES:
                raise DataError(f"a message has the role {role!r}", "use one of: " + ", ".join(ROLES))
            ids += [self._ids[f"<{role}>"], *self.encode(str(message["content"]))]
            if role == "assistant":
                ids += self.eos_ids
        return np.asarray([*ids, self._ids["<assistant>"]], np.int32)

    def save(self, folder: Path) -> None:
        """tokenizer.json and tokenizer_config.json; AutoTokenizer reads them with the same ids."""
        inner = Tokenizer(models.WordLevel(self._ids, unk_token=UNKNOWN))
        inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        inner.decoder = decoders.Fuse()
        inner.add_special_tokens(list(SPECIAL_TOKENS))
        inner.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, self._ids[BOS])]
        )
        inner.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "rollbook_alphabet": self.alphabet,
            "pad_token": PAD,
            "bos_token": BOS,
            "eos_token": EOS,
            "unk_token": UNKNOWN,
            "extra_special_tokens": [f"<{role}>" for role in ROLES],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        }
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def saved_alphabet(folder: Path) -> str | None:
    """The alphabet of a character tokenizer that was saved in `folder`; None: some other tokenizer."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        alphabet = json.loads(path.read_text(encoding="utf-8")).get("rollbook_alphabet")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", "restore the file or use another tokenizer"
        ) from None
    return None if alphabet is None else str(alphabet)
