"""How the tokenizer of a GGUF file splits texts before it merges, which transformers leaves out when it loads one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from medusa_engine.exporter.gguf_header import check_gguf

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

_BYTE_PAIRS = "gpt2"  # tokenizer.ggml.model; the others do not split
# tokenizer.ggml.pre: as GPT-2, as GPT-2 with each digit alone, with up to three digits together (Llama 3), and with
# each digit alone otherwise (Qwen 2). https://github.com/ggml-org/llama.cpp, src/llama-vocab.cpp
_AS_GPT2 = ("gpt-2", "mpt", "olmo", "jais")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_AS_LLAMA_3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")
_AS_QWEN_2 = ("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_as_gguf_says(tokenizer: Tokenizer, path: Path) -> str | None:
    """Let a tokenizer that was loaded from a GGUF file split texts as that file says; in place.

    Returns:
        A note to print where the file says what is not known here, and nothing was changed.
    """
    texts = check_gguf(path).texts
    if texts.get("tokenizer.ggml.model") != _BYTE_PAIRS:
        return None
    kind = texts.get("tokenizer.ggml.pre")
    splitting = _pre_tokenizer(kind)
    if splitting is None:
        return (
            f"its tokenizer splits texts as {kind or 'no one says'}, which is not known here: some may get other tokens"
            " than the model was trained on; the model's Hugging Face folder has its own tokenizer"
        )
    tokenizer.pre_tokenizer = splitting
    if kind in _AS_LLAMA_3:
        tokenizer.model.ignore_merges = True  # a word of the vocabulary is taken whole
    return None


def _pre_tokenizer(kind: str | None) -> PreTokenizer | None:
    from tokenizers import Regex, pre_tokenizers

    if kind in _AS_GPT2 or kind in _SINGLE_DIGITS:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if kind in _AS_GPT2:
            return words
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if kind in _AS_LLAMA_3 or kind in _AS_QWEN_2:
        pattern = Regex(_WORDS.format(digits="{1,3}" if kind in _AS_LLAMA_3 else ""))
        words = pre_tokenizers.Split(pattern, behavior="isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return None
