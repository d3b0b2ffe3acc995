"""Find and load the backbone a user names: a Hugging Face folder, a hub id or a GGUF file."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa_engine.exporter.adapter import ADAPTER_FILE, merge_adapter
from medusa_engine.exporter.attention import ATTENTION_NAME, register_tree_attention
from medusa_engine.exporter.config_sizes import check_layer_limit, check_positions, check_sizes
from medusa_engine.exporter.error_text import first_line
from medusa_engine.exporter.family import check_family
from medusa_engine.exporter.gguf_config import complete_config
from medusa_engine.exporter.gguf_fields import GGUFFields
from medusa_engine.exporter.gguf_header import check_gguf
from medusa_engine.exporter.gguf_rope import scale_rope
from medusa_engine.exporter.gguf_tensors import check_used
from medusa_engine.exporter.loaded_weights import check_parameters
from medusa_engine.exporter.text_decoder import NAMES
from medusa_engine.exporter.weight_files import check_weights, weight_files
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.generation_config import read_stop_token_ids
from medusa_engine.runtime.strict_json import read_json

_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "medusa_lm_head.pt"]
_FILE_SUFFIXES = (".safetensors", ".pt", ".bin", ".gguf", ".onnx")
_MAX_CONFIG_BYTES = 16 << 20
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_ADAPTER_CONFIG = "adapter_config.json"
_HEAD_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


@dataclass(frozen=True)
class Source:
    """Where a checkpoint lies.

    Attributes:
        name: what the user called it.
        folder: that holds it.
        gguf: file name in `folder`, or None for a Hugging Face folder.
        heads: folder of the Medusa heads, if the user named a Medusa repository.
        adapter: folder of a LoRA adapter to merge into the model, if that repository brings one.
    """

    name: str
    folder: Path
    gguf: str | None = None
    heads: Path | None = None
    adapter: Path | None = None

    @property
    def path(self) -> Path:
        return self.folder / self.gguf if self.gguf else self.folder

    @property
    def has_tokenizer(self) -> bool:
        return self.gguf is not None or any((self.folder / name).is_file() for name in _TOKENIZER_FILES)

    def load_options(self) -> dict[str, Any]:
        """Arguments of transformers' `from_pretrained`."""
        options: dict[str, Any] = {
            "pretrained_model_name_or_path": str(self.folder),
            "local_files_only": True,
            "trust_remote_code": False,  # left open, transformers would ask on the terminal
        }
        return options | ({"gguf_file": self.gguf} if self.gguf else {})

    def weight_files(self) -> list[Path]:
        """The files that hold the weights, that of the adapter last; errors as in `weight_files.py`."""
        files = [self.path] if self.gguf else weight_files(self.folder, experts=_experts(read_config(self.folder)))
        if self.adapter:
            files.append(self.adapter / ADAPTER_FILE)
        for file in files:
            check_weights(file)
        return files


def find_source(model: str, *, heads: Path | None = None, adapted: bool = False) -> Source:
    """Resolve what a user gave as model.

    A Medusa repository (its config has `medusa_num_heads`) is a whole model that holds its heads, or names its base,
    which is resolved in turn; so is the base of an adapter as peft saves it.

    Args:
        model: folder, hub id or .gguf file.
        heads: the Medusa repository that names this model as its base.
        adapted: an adapter names this model as its base.

    Raises:
        UserError: nothing is there, or it is not a checkpoint.
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"{model}: there is no such file", "check the path of the .gguf file")
        return Source(name=path.stem, folder=path.parent, gguf=path.name, heads=heads)
    folder = find_folder(model, what="model")
    if (folder / _ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists():
        if adapted:
            raise UserError(f"{folder}: an adapter, not a base model", "give a model to which one adapter is added")
        return _find_adapted(model, folder, heads=heads)
    config = read_config(folder)
    whole_model = bool(list(folder.glob("model*.safetensors")))
    if "medusa_num_heads" not in config or whole_model:
        brings_heads = "medusa_num_heads" in config or any((folder / name).is_file() for name in _HEAD_FILES)
        if heads is None and brings_heads:
            heads = folder
        return Source(name=folder_name(model), folder=folder, heads=heads)
    adapter = folder if (folder / ADAPTER_FILE).is_file() else None
    hint = "give the base with --model and this repository with --heads"
    if adapter is not None:  # apart from its adapter, the base is not what the heads were trained for
        hint = f"write the base's folder or hub id into {folder / 'config.json'}"
    if heads is not None:
        raise UserError(f"{folder}: these are Medusa heads, not a base model", hint)
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(
            f"{folder / 'config.json'}: these are Medusa heads, but base_model_name_or_path names no base model", hint
        )
    try:
        found = find_source(str(folder / base) if (folder / base).is_dir() else base, heads=folder)
    except UserError as error:
        raise UserError(f"{folder / 'config.json'}: base_model_name_or_path: {error.problem}", hint) from error
    return replace(found, name=folder_name(model), adapter=adapter)


def _find_adapted(model: str, folder: Path, *, heads: Path | None) -> Source:
    """The base that a folder with nothing but an adapter names, and the adapter to merge into it."""
    hint = f"write the base's folder or hub id into {folder / _ADAPTER_CONFIG}"
    if not (folder / ADAPTER_FILE).is_file():
        raise UserError(
            f"{folder / ADAPTER_FILE}: the adapter's weights are missing", "adapters are read as safetensors"
        )
    config = read_json(folder / _ADAPTER_CONFIG, max_bytes=_MAX_CONFIG_BYTES, hint=hint)
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(base, str) or not base:
        raise UserError(f"{folder / _ADAPTER_CONFIG}: base_model_name_or_path names no base model", hint)
    try:
        found = find_source(str(folder / base) if (folder / base).is_dir() else base, heads=heads, adapted=True)
    except UserError as error:
        raise UserError(f"{folder / _ADAPTER_CONFIG}: base_model_name_or_path: {error.problem}", hint) from error
    if found.adapter is not None:
        raise UserError(f"{folder / _ADAPTER_CONFIG}: the base {base} is an adapter itself", hint)
    return replace(found, name=folder_name(model), adapter=folder)


def find_base(model: str) -> Source:
    """A model to train on: as `find_source`, but no adapter release.

    Raises:
        UserError: as `find_source`, or an adapter comes with it.
    """
    source = find_source(model)
    if source.adapter is not None:
        raise UserError(f"{model}: an adapter, not a base model", "give its base, or train it with --merge first")
    return source


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
    if not _HUB_ID.fullmatch(name) or path.suffix in _FILE_SUFFIXES:
        raise UserError(f"{name}: there is no such {what}", "give an existing folder, a hub id or a .gguf file")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # its own errors, the HTTP library's, or the disk's
        raise UserError(
            f"{name}: no such folder, and the hub does not give a {what} of that id: {first_line(error)}",
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


def _experts(config: dict[str, Any]) -> int:
    """Experts of a layer that has any; 0 where the config tells of none."""
    counts = [config.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts")]
    return max((count for count in counts if type(count) is int), default=0)


def load_model(source: Source, dtype: str = "float32") -> Any:
    """The backbone as a transformers causal LM, in evaluation mode, with tree attention and the adapter merged.

    Of a model that reads images too it is the text decoder.

    Args:
        dtype: of its weights. Of safetensors that are stored so no copy is made.

    Raises:
        UserError: the checkpoint's kind is not exported, or it is damaged or lacks weights (none are ever made up).
    """
    with warnings.catch_warnings():  # what libraries warn of is checked, and refused, here
        warnings.simplefilter("ignore")
        return _load_model(source, dtype)


def _load_model(source: Source, dtype: str) -> Any:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    if source.gguf:
        check_weights(source.path)  # the config is in there
        check_layer_limit(source.path, {"num_hidden_layers": check_gguf(source.path).layers})
    else:
        check_layer_limit(source.folder / "config.json", read_config(source.folder))
    config, is_part = check_family(source.path, source.load_options())
    fields = GGUFFields(source.path) if source.gguf else None
    if fields is not None:
        complete_config(config, fields)
    check_positions(source.path, config)
    files = source.weight_files()
    base_files = files[:-1] if source.adapter else files
    if not source.gguf and read_config(source.folder).get("transformers_weights") is not None:
        raise UserError(
            f"{source.folder / 'config.json'}: transformers_weights names other weights than {files[0].name}",
            "remove it, and give the weights their usual name",
        )
    transformers.utils.logging.disable_progress_bar()
    settings = source.folder / "generation_config.json"
    if settings.is_file() and not source.gguf:
        read_stop_token_ids(settings)  # transformers goes on without a damaged file, and the stop tokens would be lost
    register_tree_attention()
    try:
        check_sizes(source.path, config, base_files, ATTENTION_NAME)
        model, info = AutoModelForCausalLM.from_pretrained(
            **source.load_options(),
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with the tensor's name
            **({} if source.gguf else {"use_safetensors": True}),
            **({"key_mapping": NAMES} if is_part else {}),
        )
    except UserError:
        raise
    except Exception as error:  # transformers and safetensors raise whatever the file made them trip over
        raise UserError(
            f"{source.path}: cannot load the model: {first_line(error)}",
            "give a decoder-only causal LM that transformers loads, with complete safetensors or GGUF weights",
        ) from error
    hint = "fetch the checkpoint again: weights are never made up"
    tied = getattr(model, "all_tied_weights_keys", {}) if model.config.tie_word_embeddings else {}
    if missing := sorted(info["missing_keys"], key=lambda name: (name in tied, name)):  # what another is tied to first
        raise UserError(f"{source.path}: tensors are missing ({len(missing)}), the first is {missing[0]}", hint)
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, needed = mismatched[0]
        raise UserError(f"{source.path}: {name} has shape {list(found)}, but config.json asks for {list(needed)}", hint)
    if fields is not None:
        scale_rope(model, fields)
        check_used(model, fields)
    check_parameters(model, base_files)
    return (merge_adapter(model, source.adapter) if source.adapter else model).eval()
