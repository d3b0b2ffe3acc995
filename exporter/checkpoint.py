"""Find and load the backbone a user names: a Hugging Face folder, a hub id or a GGUF file."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_engine.exporter.attention import ATTENTION_NAME, register_tree_attention
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import file_sha256
from medusa_engine.runtime.strict_json import read_json

_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "medusa_lm_head.pt"]
_MAX_CONFIG_BYTES = 16 << 20
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_HEAD_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


@dataclass(frozen=True)
class Source:
    """Where a checkpoint lies.

    Attributes:
        name: what the user called it.
        folder: that holds it.
        gguf: file name in `folder`, or None for a Hugging Face folder.
        heads: folder of the Medusa heads, if the user named a Medusa repository.
    """

    name: str
    folder: Path
    gguf: str | None = None
    heads: Path | None = None

    @property
    def path(self) -> Path:
        return self.folder / self.gguf if self.gguf else self.folder

    @property
    def has_tokenizer(self) -> bool:
        return self.gguf is not None or any((self.folder / name).is_file() for name in _TOKENIZER_FILES)

    def load_options(self) -> dict[str, Any]:
        """Arguments of transformers' `from_pretrained`."""
        options: dict[str, Any] = {"pretrained_model_name_or_path": str(self.folder), "local_files_only": True}
        return options | ({"gguf_file": self.gguf} if self.gguf else {})

    def weight_hashes(self) -> dict[str, str]:
        """File name -> sha256 of every weights file."""
        paths = [self.path] if self.gguf else sorted(self.folder.glob("*.safetensors"))
        return {path.name: file_sha256(path) for path in paths}


def find_source(model: str) -> Source:
    """Resolve what a user gave as model.

    A Medusa repository (its config has `medusa_num_heads`) names its base, which is resolved in turn.

    Raises:
        UserError: nothing is there, or it is not a checkpoint.
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"{model}: there is no such file", "check the path of the .gguf file")
        return Source(name=path.stem, folder=path.parent, gguf=path.name)
    folder = find_folder(model, what="model")
    config = read_config(folder)
    if "medusa_num_heads" not in config or list(folder.glob("model*.safetensors")):
        heads = folder if any((folder / name).is_file() for name in _HEAD_FILES) else None
        return Source(name=folder_name(model), folder=folder, heads=heads)
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(
            f"{folder / 'config.json'}: these are Medusa heads, but base_model_name_or_path names no base model",
            "give the base with --model and this repository with --heads",
        )
    if (folder / base).is_dir():
        base = str(folder / base)
    found = find_source(base)
    return Source(name=folder_name(model), folder=found.folder, gguf=found.gguf, heads=folder)


def find_folder(name: str, *, what: str) -> Path:
    """A local folder, or the snapshot of a hub id (downloaded, or from the hub's local cache).

    Raises:
        UserError: neither is to be had.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(
            f"{name}: this {what} is a file that is not understood", "give a folder, a hub id or a .gguf file"
        )
    if not _HUB_ID.fullmatch(name):
        raise UserError(f"{name}: there is no such {what}", "give an existing folder, a hub id or a .gguf file")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{name}: no such folder, and the hub does not give a {what} of that id: {reason}",
            "check the name; offline, only models in the hub's local cache can be used",
        ) from error


def folder_name(model: str) -> str:
    """A short name for a folder or hub id."""
    return Path(model).expanduser().resolve().name if Path(model).exists() else model.split("/")[-1]


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a folder.

    Raises:
        UserError: missing, or not a JSON object.
    """
    hint = "give a folder in the Hugging Face layout, with config.json and safetensors weights"
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no config.json, so this is not a model folder", hint)
    config = read_json(folder / "config.json", max_bytes=_MAX_CONFIG_BYTES, hint=hint)
    if not isinstance(config, dict):
        raise UserError(f"{folder / 'config.json'}: not a JSON object", hint)
    return config


def load_model(source: Source) -> Any:
    """The backbone as a transformers causal LM in fp32, evaluation mode, with tree attention.

    Raises:
        UserError: the checkpoint is of an unknown kind, damaged, or lacks weights (none are ever made up).
    """
    import torch
    from transformers import AutoModelForCausalLM

    register_tree_attention()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            **source.load_options(),
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            **({} if source.gguf else {"use_safetensors": True}),
        )
    except Exception as error:  # transformers and safetensors raise whatever the file made them trip over
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{source.path}: cannot load the model: {reason}",
            "give a decoder-only causal LM that transformers loads, with complete safetensors or GGUF weights",
        ) from error
    for what in ("missing_keys", "mismatched_keys"):
        if info.get(what):
            first = sorted(str(key) for key in info[what])[0]
            raise UserError(
                f"{source.path}: {len(info[what])} weights are {what.removesuffix('_keys')}, first {first}",
                "fetch the checkpoint again: weights are never made up",
            )
    return model.eval()


def stop_token_ids(model: Any, tokenizer: Any | None) -> list[int]:
    """Every stop token that the generation settings, the config or the tokenizer name, ascending."""
    named = [model.generation_config.eos_token_id, model.config.get_text_config().eos_token_id]
    named.append(getattr(tokenizer, "eos_token_id", None))
    ids: set[int] = set()
    for value in named:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(ids)


def save_tokenizer(source: Source, folder: Path) -> Any | None:
    """Write `tokenizer.json`, its config and the chat template into `folder`; None if there is no tokenizer.

    Raises:
        UserError: the tokenizer's files are damaged or have no fast form.
    """
    if not source.has_tokenizer:
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(**source.load_options())
        written = {Path(name).name for name in tokenizer.save_pretrained(folder)}
    except Exception as error:  # as in load_model
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{source.path}: cannot load the tokenizer: {reason}",
            "repair the tokenizer's files, or remove them to export an engine that runs by token ids",
        ) from error
    if "tokenizer.json" not in written:
        raise UserError(
            f"{source.path}: the tokenizer has no fast form (tokenizer.json)",
            "convert it with transformers, or remove its files to export an engine that runs by token ids",
        )
    for name in written - {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}:
        (folder / name).unlink(missing_ok=True)
    return tokenizer


def write_generation_config(path: Path, stop_ids: list[int]) -> None:
    """Write the generation settings the runtime reads: every stop id."""
    path.write_text(json.dumps({"eos_token_id": stop_ids}, indent=2) + "\n", encoding="utf-8")
