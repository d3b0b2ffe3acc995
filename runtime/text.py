"""Text to token ids and back, with a checkpoint's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from medusa_engine.runtime.chat_template import TEMPLATE_FILE, ChatTemplate
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.stream_decoder import StreamDecoder
from medusa_engine.runtime.strict_json import read_json, shown
from medusa_engine.runtime.tokenizer_errors import CONFIG_HINT, refusing
from medusa_engine.runtime.utf8_file import read_utf8_file

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"

_MAX_CONFIG_BYTES = 64 << 20  # old configs repeat every added token
_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "cls_token",
    "eos_token",
    "mask_token",
    "pad_token",
    "sep_token",
    "unk_token",
)


class Tokenizer:
    """The tokenizer of a bundle: what `tokenizer.json` says, with the named tokens of its config.

    Prompt text is read as the checkpoint's own tokenizer reads it: the text of a special token, such as
    `</s>`, becomes that token. `special_tokens_in` tells which a prompt holds.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None,
        stop_token_ids: tuple[int, ...],
        chat_template: ChatTemplate | None,
        folder: Path,
    ) -> None:
        self._backend = backend
        self._bos_token_id = bos_token_id
        self._stop_token_ids = stop_token_ids
        self._chat_template = chat_template
        self._folder = folder

    @classmethod
    def open(cls, folder: Path) -> Tokenizer:
        """Return the tokenizer of a folder that holds `tokenizer.json`.

        `tokenizer_config.json` (named tokens, chat template) and `chat_template.jinja` are optional.

        Raises:
            UserError: a file cannot be read or is not valid; names the file.
        """
        path = folder / TOKENIZER_FILE
        with refusing(f"{path}: cannot load the tokenizer"):
            backend = tokenizers.Tokenizer.from_file(str(path))
        # A saved cut or padding length belongs to training batches, not to a prompt.
        backend.no_truncation()
        backend.no_padding()

        config_path = folder / CONFIG_FILE
        config = _read_config(config_path)
        named = _named_tokens(config, config_path)
        named_ids: dict[str, int] = {}
        for name in ("bos_token", "eos_token"):
            if name in named:
                token_id = backend.token_to_id(named[name])
                if token_id is None:
                    raise UserError(f"{config_path}: {name} {shown(named[name])} is not a token of {path}", CONFIG_HINT)
                named_ids[name] = token_id
        return cls(
            backend,
            bos_token_id=named_ids.get("bos_token"),
            stop_token_ids=(named_ids["eos_token"],) if "eos_token" in named_ids else (),
            chat_template=ChatTemplate.find(folder, config, config_file=config_path, special_tokens=named),
            folder=folder,
        )

    @property
    def bos_token_id(self) -> int | None:
        """The id of the config's `bos_token`; None without one."""
        return self._bos_token_id

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The id of the config's `eos_token`; empty without one."""
        return self._stop_token_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` and `encode_chat` can be used."""
        return self._chat_template is not None

    @cached_property
    def vocabulary_size(self) -> int:
        """One more than the highest token id, added tokens included: a model needs that many embeddings."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; empty for an empty text without special tokens.

        Args:
            text: the prompt.
            add_special_tokens: add what the tokenizer puts around a plain prompt, such as a BOS token.

        Raises:
            UserError: the text holds half of a surrogate pair, as undecodable command line bytes do, or the tokenizer
                is damaged.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"prompt text: character {error.start} is not valid Unicode ({error.reason})",
                "give the prompt as UTF-8 text",
            ) from error
        with refusing(f"{self._folder / TOKENIZER_FILE}: the tokenizer fails"):
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, spaces before punctuation kept; unknown ids have no text."""
        with refusing(f"{self._folder / TOKENIZER_FILE}: the tokenizer fails"):
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def stream_decoder(self, skip_special_tokens: bool = True, *, prompt_ids: Sequence[int] = ()) -> StreamDecoder:
        """Return a decoder of the ids that follow `prompt_ids`; see `StreamDecoder`."""
        file = self._folder / TOKENIZER_FILE
        return StreamDecoder(self._backend, file=file, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids)

    def special_tokens_in(self, text: str) -> list[str]:
        """Return the special tokens whose text appears in `text`, which `encode` turns into ids."""
        added = sorted(self._backend.get_added_tokens_decoder().items())
        return [token.content for _, token in added if token.special and token.content in text]

    def render_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the prompt text of a conversation, `{"role": ..., "content": ...}` in order.

        Args:
            messages: at least one message.
            add_generation_prompt: end with the header of the assistant's next message.

        Raises:
            UserError: there is no template or no message, or the template refuses the messages or fails.
        """
        if self._chat_template is None:
            raise UserError(
                "the tokenizer has no chat template",
                f"pass a plain prompt, or put a {TEMPLATE_FILE} into the folder",
                file=self._folder,
            )
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of a conversation, ready for the assistant's next message.

        The template writes the special tokens, BOS included, so none is added to what it renders.

        Raises:
            UserError: as `render_chat` and `encode`.
        """
        return self.encode(self.render_chat(messages), add_special_tokens=False)


def read_prompt_file(path: Path) -> str:
    """Return the text of a UTF-8 prompt file; newlines and trailing spaces are kept as they are.

    Raises:
        UserError: the file cannot be read, or is not UTF-8; names the file and the byte offset.
    """
    return read_utf8_file(path, hint="save the prompt as UTF-8 text")


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    config = read_json(path, max_bytes=_MAX_CONFIG_BYTES, hint=CONFIG_HINT)
    if not isinstance(config, dict):
        raise UserError(f"{path}: expected a JSON object, found {shown(config)}", CONFIG_HINT)
    return config


def _named_tokens(config: Mapping[str, object], path: Path) -> dict[str, str]:
    """The config's special tokens by name; each is written as its text or as `{"content": text, ...}`."""
    named: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if content is None:
            continue
        if not isinstance(content, str):
            raise UserError(f"{path}: {name} {shown(value)} is not a token", CONFIG_HINT)
        named[name] = content
    return named
