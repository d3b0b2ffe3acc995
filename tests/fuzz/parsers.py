"""Every parser of what comes from outside, as a function of bytes; what they may raise, and nothing else."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from checkpoints import ARTIFACTS, TREES

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import MANIFEST_NAME, Limits, document_sha256, read_manifest
from medusa_engine.runtime.tree import check_tree, load_tree
from medusa_engine.runtime.tree_buffers import compile_tree

HEADS, TOPK, NODES = 4, 16, 64
LIMITS = Limits(
    layers=2,
    kv_heads=2,
    head_dim=8,
    cache_rows=69,
    max_length=64,
    heads=HEADS,
    topk=TOPK,
    max_tree_nodes=NODES,
    vocab_size=272,
)


@cache
def folder() -> Path:
    """A folder of this process, whose files are written over."""
    kept = tempfile.TemporaryDirectory(prefix="medusa-fuzz-")
    _kept.append(kept)
    return Path(kept.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


def read_tree(data: bytes) -> None:
    path = folder() / "tree.json"
    path.write_bytes(data)
    tree = load_tree(path)
    check_tree(tree, heads=HEADS, topk=TOPK, max_tree_nodes=NODES)
    compile_tree(tree, topk=TOPK, depth=HEADS)
    json.dumps([tree.name, tree.paths, tree.metadata])


def read_bundle_manifest(data: bytes) -> None:
    (folder() / MANIFEST_NAME).write_bytes(data)
    try:
        document = json.loads(data)
        del document["sha256"]
        sealed = json.dumps(document | {"sha256": document_sha256(document)})
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    else:  # so that more than the seal is read
        (folder() / MANIFEST_NAME).write_text(sealed)
    manifest = read_manifest(folder())
    json.dumps(manifest.document())
    assert manifest.cache_bytes > 0


def read_safetensors(data: bytes) -> None:
    _read_heads("heads.safetensors", data)


def read_pt(data: bytes) -> None:
    _read_heads("heads.pt", data)


def _read_heads(name: str, data: bytes) -> None:
    from medusa_engine.exporter.head_checkpoint import read_checkpoint

    path = folder() / name
    path.write_bytes(data)
    assert read_checkpoint(path).weights.heads > 0


def read_gguf(data: bytes) -> None:
    from medusa_engine.exporter.gguf_header import check_gguf

    path = folder() / "model.gguf"
    path.write_bytes(data)
    check_gguf(path)


def read_graph(data: bytes) -> None:
    from medusa_engine.runtime.graph_file import check_external_data

    path = folder() / "round.onnx"
    path.write_bytes(data)
    check_external_data(path, "weights.bin")


def read_chat_data(data: bytes) -> None:
    from medusa_engine.training.chat_data import read_chat_data

    path = folder() / "data.jsonl"
    path.write_bytes(data)
    read_chat_data(path)


def read_completion(data: bytes) -> None:
    _read_request(data, chat=False)


def read_chat(data: bytes) -> None:
    _read_request(data, chat=True)


def _read_request(data: bytes, *, chat: bool) -> None:
    from medusa_engine.runtime.serve.asked import read_request
    from medusa_engine.runtime.serve.errors import RequestError
    from medusa_engine.runtime.serve.options import ServeOptions

    try:
        asked = read_request(data, _engine(), ServeOptions(model_name="tiny"), chat=chat)
    except RequestError as refusal:
        if not 400 <= refusal.status < 500:
            raise RuntimeError(f"status {refusal.status}") from refusal
        json.dumps(refusal.document()).encode("ascii")
        raise UserError(refusal.message, "") from refusal
    assert all(0 <= token < LIMITS.vocab_size for token in asked.prompt_ids)


@cache
def _engine() -> Any:
    """What a request is checked against: an engine without its graphs."""
    from checkpoints import TOKENIZERS

    from medusa_engine.runtime.engine import Engine
    from medusa_engine.runtime.text import Tokenizer

    tokenizer = Tokenizer.open(TOKENIZERS / "bytelevel_bos_twice")
    manifest = SimpleNamespace(name="tiny", policies=("greedy", "sample", "typical"), repetition_penalty=True)
    engine = Engine.__new__(Engine)
    state = {"limits": LIMITS, "tokenizer": tokenizer, "stop_token_ids": frozenset(), "_plan": None}
    engine.__dict__.update(manifest=manifest, **state)
    return engine


Parser = Callable[[bytes], None]
PARSERS: dict[str, Parser] = {
    "tree": read_tree,
    "manifest": read_bundle_manifest,
    "safetensors": read_safetensors,
    "pt": read_pt,
    "gguf": read_gguf,
    "graph": read_graph,
    "completion": read_completion,
    "chat": read_chat,
    "chat_data": read_chat_data,
}


def check(parser: Parser, data: bytes) -> bool:
    """Whether the parser takes the bytes; it may refuse them with a `UserError`, and do nothing else."""
    try:
        parser(data)
    except UserError:
        return False
    return True


def seeds(name: str) -> list[bytes]:
    """Inputs to begin with: right ones, and those that broke other tools."""
    if name == "tree":
        return [path.read_bytes() for path in sorted(TREES.glob("*.json")) if path.name != "EXPECTED.json"]
    if name == "manifest":
        return [json.dumps(manifest_document()).encode()]
    if name in ("safetensors", "pt"):
        return [path.read_bytes() for path in sorted(ARTIFACTS.glob(f"*.{name}"))] + _small_heads(name)
    if name == "gguf":
        return [gguf_file()]
    if name == "graph":
        return [path.read_bytes() for path in sorted(ARTIFACTS.glob("*.onnx"))]
    if name == "chat_data":
        lines = ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], {"input_ids": [1, 2]})
        return ["\n".join(map(json.dumps, lines)).encode()]
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]} if name == "chat" else {"prompt": "a"}
    sampled = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "acceptance": "sample", "max_tokens": 4, "stop": ["x"]}
    return [json.dumps(prompt).encode(), json.dumps(prompt | sampled).encode()]


def manifest_document() -> dict[str, Any]:
    from dataclasses import asdict

    from medusa_engine.runtime.manifest import FORMAT_VERSION

    facts = {"bytes": 1, "sha256": "0" * 64}
    graphs = {"round": "round.onnx", "step": "step.onnx"}
    names = (*graphs.values(), "weights.bin", "tree.json", "generation_config.json")
    return {
        "format": "medusa-bundle",
        "format_version": FORMAT_VERSION,
        "name": "tiny",
        "target": "onnxruntime",
        "dtype": "float32",
        "weights": "float32",
        "limits": asdict(LIMITS),
        "model": {},
        "heads": {},
        "tools": {},
        "graphs": graphs,
        "files": dict.fromkeys(names, facts),
        "policies": ["greedy"],
        "repetition_penalty": False,
        "trees": ["tree.json"],
        "sha256": "",
    }


def gguf_file() -> bytes:
    import struct

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    pairs = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    pairs += text(b"tokens") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"b")
    tensor = text(b"t") + struct.pack("<IQIQ", 1, 8, 0, 0)
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 2) + pairs + tensor
    return header + bytes(-len(header) % 32) + bytes(32)


def _small_heads(name: str) -> list[bytes]:
    import io

    import torch
    from safetensors.torch import save

    tensors = {
        "0.0.linear.weight": torch.zeros(2, 2),
        "0.0.linear.bias": torch.zeros(2),
        "0.1.weight": torch.ones(3, 2),
    }
    if name == "safetensors":
        return [save(tensors)]
    file = io.BytesIO()
    torch.save(tensors, file)
    return [file.getvalue()]
