"""medusa-export refuses sizes of a config that the weights do not have before it makes room for them."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from bundle_edits import edit_manifest
from checkpoints import edit_json
from command_checks import ExportRefuses
from families import FAMILIES, save_family
from gguf_files import save_gguf

from medusa_engine.exporter.bundle import check_readable
from medusa_engine.runtime.errors import UserError

VAST = 10**9  # numbers of it fit no memory, and loops over it do not end


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"vocab_size": VAST}, ["model.embed_tokens.weight", "[128, 32]", f"[{VAST}, 32]"]),
        ({"vocab_size": 10**18}, ["cannot load the model"]),
        ({"hidden_size": 10**8, "head_dim": 8}, ["model.embed_tokens.weight", "[128, 32]"]),
        ({"intermediate_size": 10**12}, ["model.layers.0.mlp.gate_proj.weight", "[40, 32]"]),
        ({"head_dim": VAST}, ["model.layers.0.self_attn.q_proj.weight", "[32, 32]"]),
        ({"num_hidden_layers": 300}, ["the config asks for 300 layers", "of 2"]),
        ({"num_hidden_layers": VAST}, [f"num_hidden_layers is {VAST}, more"]),
        ({"num_hidden_layers": VAST, "model_type": "qwen2"}, [f"num_hidden_layers is {VAST}, more"]),
        ({"num_local_experts": VAST, "model_type": "mixtral"}, ["the config asks for", "numbers"]),
        ({"text_config": {"num_hidden_layers": VAST}, "model_type": "gemma3"}, [f"num_hidden_layers is {VAST}, more"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_config_of_other_sizes_than_the_weights(
    values: dict[str, Any], named: list[str], model_copy: Path, export_refuses: ExportRefuses
) -> None:
    edit_json(model_copy / "config.json", **values)
    export_refuses(model_copy, named=[model_copy, *named])


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("block_count", "num_hidden_layers is 4000000000"),
        ("feed_forward_length", "numbers"),
        ("embedding_length", "numbers"),
    ],
)
def test_gguf_header_of_other_sizes_than_the_tensors(
    field: str, named: str, tmp_path: Path, export_refuses: ExportRefuses
) -> None:
    from transformers import AutoModelForCausalLM

    config = FAMILIES["Llama 1, Llama 2"].config | {"head_dim": 8, "rope_theta": 500.0, "vocab_size": 272}
    save_family(tmp_path / "model", config, seed=1)
    file = tmp_path / "tiny.gguf"
    save_gguf(file, AutoModelForCausalLM.from_pretrained(tmp_path / "model"), "F32")
    data = bytearray(file.read_bytes())
    struct.pack_into("<I", data, data.index(key := f"llama.{field}".encode()) + len(key) + 4, 4_000_000_000)
    file.write_bytes(data)
    export_refuses(file, named=[file, named])


@pytest.mark.parametrize("positions", [-5, 0])
def test_config_without_room_for_a_token(positions: int, model_copy: Path, export_refuses: ExportRefuses) -> None:
    edit_json(model_copy / "config.json", max_position_embeddings=positions)
    export_refuses(model_copy, named=[model_copy, f"max_position_embeddings is {positions}"])


def test_rope_without_room_for_a_token(tmp_path: Path, export_refuses: ExportRefuses) -> None:
    """What the runtime would say of the bundle is said of the model, before it is traced."""
    family = FAMILIES["Phi-3, longrope"]
    save_family(tmp_path / "model", family.config, seed=family.seed)
    edit_json(tmp_path / "model" / "config.json", original_max_position_embeddings=-5)
    export_refuses(tmp_path / "model", named=[tmp_path / "model", '"limits.max_length" is -5'])


def test_stop_token_past_every_token_id(model_copy: Path, export_refuses: ExportRefuses) -> None:
    edit_json(model_copy / "config.json", eos_token_id=10**30)
    export_refuses(model_copy, named=[model_copy, "eos_token_id", "is not a token id"])


def test_feed_forward_of_nothing_is_refused_without_a_library_s_warning(
    model_copy: Path, export_refuses: ExportRefuses
) -> None:
    edit_json(model_copy / "config.json", intermediate_size=0)
    export_refuses(model_copy, named=[model_copy, "has shape [32, 40], but config.json asks for [32, 0]"])


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("manifest.json", None, "limits.max_length"),
        ("generation_config.json", '{"eos_token_id": 4294967296}', "not a token id"),
        ("tree.json", "[[[0]]]", "tree.json"),
    ],
)
def test_bundle_is_read_as_the_runtime_reads_it(
    name: str, text: str | None, named: str, plain_bundle: Path, tmp_path: Path
) -> None:
    check_readable(plain_bundle)
    bundle = Path(shutil.copytree(plain_bundle, tmp_path / "bundle"))
    if text is not None:
        (bundle / name).write_text(text)
    edit_manifest(bundle, lambda document: document["limits"].update(max_length=-5) if text is None else None)
    with pytest.raises(UserError, match=named):
        check_readable(bundle)
