"""What Medusa-2 training leaves: an adapter with heads, or one whole model. Never heads without their backbone."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError

from medusa_engine.exporter import checkpoint
from medusa_engine.exporter.adapter import ADAPTER_FILE
from medusa_engine.exporter.head_checkpoint import HEAD_FILES, HeadCheckpoint, write_checkpoint
from medusa_engine.exporter.head_formats import MEDUSA_2, ORIGINAL
from medusa_engine.exporter.heads import HeadWeights
from medusa_engine.exporter.output_file import make_folder, writing
from medusa_engine.exporter.saved_tokenizer import save_tokenizer
from medusa_engine.runtime.manifest import file_sha256
from medusa_engine.training.json_file import write_json
from medusa_engine.training.medusa2_model import Medusa2

_CONFIG = "config.json"


def write_adapter_release(model: Medusa2, base: str, folder: Path) -> None:
    """Write the LoRA adapter in peft's layout and the heads, which name it by its sha256.

    Args:
        base: folder or hub id of the base model, as `medusa-export` finds it.
    """
    with _put_together(folder) as partial:
        for settings in model.backbone.peft_config.values():
            settings.base_model_name_or_path = base
        model.backbone.save_pretrained(str(partial), save_embedding_layers=False)
        (partial / "README.md").unlink(missing_ok=True)  # an empty form
        weights = replace(model.head_weights().half(), adapter=file_sha256(partial / ADAPTER_FILE))
        heads = HeadCheckpoint((partial,), ORIGINAL, weights, "float16", biases=True, base=base, notes=())
        write_checkpoint(heads, ORIGINAL, partial / HEAD_FILES[0])
        write_json(partial / _CONFIG, {"base_model_name_or_path": base, **_shape(weights)}, indent=2)


def write_merged_release(model: Medusa2, source: checkpoint.Source, folder: Path) -> None:
    """Write the backbone with the adapter merged and the heads as one model; it is merged in memory too.

    Config, tokenizer and generation settings are those of the source.
    """
    heads = model.head_weights()
    merged = model.backbone.merge_and_unload()
    settings = source.folder / "generation_config.json"
    with _put_together(folder) as partial:
        for name, value in _shape(heads).items():
            setattr(merged.config, name, value)
        copied = settings.is_file() and source.gguf is None
        if copied:
            merged.generation_config = transformers.GenerationConfig()  # transformers saves none that it finds odd
        tensors = {**merged.state_dict(), **_head_tensors(heads, merged.dtype)}
        merged.save_pretrained(partial, state_dict=tensors)
        if copied:
            shutil.copy(settings, partial / settings.name)
        save_tokenizer(source, partial)


def _head_tensors(heads: HeadWeights, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = {}
    for head in range(heads.heads):
        for layer in range(heads.layers):
            name = MEDUSA_2.residual.format(h=head, l=layer)
            tensors[f"{name}.weight"] = heads.residual_weight[head, layer].to(dtype).contiguous()
            tensors[f"{name}.bias"] = heads.residual_bias[head, layer].to(dtype)
    return tensors


def _shape(heads: HeadWeights) -> dict[str, int]:
    return {"medusa_num_heads": heads.heads, "medusa_num_layers": heads.layers}


@contextmanager
def _put_together(folder: Path) -> Iterator[Path]:
    """A folder to write into, whose files then come into `folder`, the config last; older release files go before."""
    make_folder(folder)
    with (
        writing(folder, also=(SafetensorError,)),
        tempfile.TemporaryDirectory(dir=folder, prefix=".release-") as partial,
    ):
        yield Path(partial)
        stale = [*folder.glob("*.safetensors"), *folder.glob("model.safetensors.index.json")]
        for path in [folder / _CONFIG, *stale]:
            path.unlink(missing_ok=True)
        for path in sorted(Path(partial).iterdir(), key=lambda path: path.name == _CONFIG):
            path.replace(folder / path.name)
