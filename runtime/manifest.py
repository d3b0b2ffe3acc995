"""The manifest of a bundle: what it is, which files it has, and the sizes fixed in its graphs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.listed_files import check_plain_name, listed_files
from medusa_engine.runtime.policy import GREEDY, POLICIES, TYPICAL, graph_variant
from medusa_engine.runtime.strict_json import read_json, shown, stated

FORMAT = "medusa-bundle"
FORMAT_VERSION = 3  # of 1 the graphs did not end answers themselves; of 2 there was no target
MANIFEST_NAME = "manifest.json"
WEIGHTS_NAME = "weights.bin"
TREE_NAME = "tree.json"
GENERATION_NAME = "generation_config.json"
GRAPH_SUFFIX = ".onnx"
KINDS = ("round", "step")
ONNXRUNTIME, TENSORRT = "onnxruntime", "tensorrt"
TARGET_DTYPES = {
    ONNXRUNTIME: ("float32",),
    TENSORRT: ("float16", "bfloat16"),
}  # of weights and cache, the default first
WEIGHT_FORMATS = {
    "float32": ("float32", "int8", "int4"),
    "float16": ("float16",),
    "bfloat16": ("bfloat16",),
}  # by dtype
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
LARGEST_LIMIT = 1 << 31  # every size is below

MAX_MANIFEST_BYTES = 1 << 20
_MOST_CACHE_ELEMENTS = 1 << 44  # no machine has more
MOST_LAYERS = 1 << 14
_FOLDER_HINT = "give the folder that medusa-export wrote, engines/NAME"
EXPORT_HINT = "export the model again with medusa-export (--force replaces a bundle)"
COPY_HINT = f"copy the whole folder again, or {EXPORT_HINT}"


@dataclass(frozen=True)
class Limits:
    """Sizes fixed when a model is exported.

    Attributes:
        layers, kv_heads, head_dim: of the key/value cache.
        cache_rows: S_max, rows of the cache buffers; `max_length` and the slack of the compaction body, for fixed
            shapes `max_tree_nodes` more.
        max_length: rows that may hold prompt and answer.
        heads: K Medusa heads, as deep as the paths of ranks in a tree may be; 0 where lookup alone proposes.
        topk: ranks each head offers.
        max_tree_nodes: packed rows of a tree, root included.
        vocab_size: rows of the LM projection.
        lookup: lookup nodes a tree may have: tokens that the context proposes; 0 without.
    """

    layers: int
    kv_heads: int
    head_dim: int
    cache_rows: int
    max_length: int
    heads: int
    topk: int
    max_tree_nodes: int
    vocab_size: int
    lookup: int = 0

    @property
    def depth(self) -> int:
        """D, edges of the longest path; `retrieve_indices` has D+1 columns."""
        return max(self.heads, self.lookup)

    @property
    def cache_elements(self) -> int:
        """Numbers in one session's key/value cache."""
        return 2 * self.layers * self.kv_heads * self.cache_rows * self.head_dim


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says.

    Attributes:
        name: what the bundle is called.
        target: what runs its graphs: "onnxruntime", as they are, or "tensorrt", once medusa-build made a plan of them.
        dtype: of the cache and of what is computed with: "float32", "float16" or "bfloat16".
        weights: of the weight matrices: the dtype, "int8" or "int4".
        limits: sizes fixed in the graphs.
        model, heads, tools: provenance: sources, hashes, versions.
        graphs: graph name -> file name.
        files: file name -> {"bytes": int, "sha256": hex} of every other file of the bundle.
        policies: acceptance policies that have graphs.
        repetition_penalty: whether each policy has graphs that penalise repetition too.
        trees: files of trees, the first is the default.
    """

    name: str
    target: str
    dtype: str
    weights: str
    limits: Limits
    model: Mapping[str, Any]
    heads: Mapping[str, Any]
    tools: Mapping[str, Any]
    graphs: Mapping[str, str]
    files: Mapping[str, Mapping[str, Any]]
    policies: tuple[str, ...]
    repetition_penalty: bool
    trees: tuple[str, ...]

    @property
    def cache_bytes(self) -> int:
        """Bytes of one session's key/value cache."""
        return self.limits.cache_elements * DTYPE_BYTES[self.dtype]

    @property
    def heads_trained(self) -> bool:
        return bool(self.heads.get("trained"))

    def document(self) -> dict[str, Any]:
        """The JSON form, format, version and its own sha256 included."""
        document = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return document | {"sha256": document_sha256(document)}


def number_formats(weights: str, dtype: str) -> str:
    """For people: `float32`, or `int4 weights, float32`."""
    return dtype if weights == dtype else f"{weights} weights, {dtype}"


def tree_names(count: int) -> list[str]:
    """File names of the trees of a bundle: tree.json, tree.2.json, tree.3.json."""
    return [TREE_NAME, *(f"tree.{number}.json" for number in range(2, count + 1))]


def graph_name(kind: str, variant: str) -> str:
    """Name of the graph of a "round" or "step" of a variant, see `policy.graph_variant`: `round.sample.penalty`."""
    return ".".join((kind, *(part for part in variant.split(".") if part != GREEDY)))


def graph_names(policies: Iterable[str], *, repetition_penalty: bool = False, target: str = ONNXRUNTIME) -> list[str]:
    """Names of all graphs of a bundle with these policies.

    Plain steps accept nothing, so `typical` has none; for TensorRT a plain step is a round of one node.
    """
    return [
        graph_name(kind, graph_variant(policy, penalised=penalised))
        for penalised in ((False, True) if repetition_penalty else (False,))
        for policy in policies
        for kind in (KINDS if target == ONNXRUNTIME else KINDS[:1])
        if (kind, policy) != ("step", TYPICAL)
    ]


def read_manifest(folder: Path) -> Manifest:
    """Read and validate the manifest of a bundle; the other files are not opened.

    Raises:
        UserError: not a bundle, another format version, changed, or a field that is missing or of the wrong kind.
    """
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        what = "there is no such folder" if not folder.exists() else "it is not a bundle folder"
        raise UserError(f"{folder}: {what}", _FOLDER_HINT)
    if not path.is_file():
        raise UserError(f"{folder}: no {MANIFEST_NAME}, so this is not a finished bundle", _FOLDER_HINT)
    return parse_manifest(read_json(path, max_bytes=MAX_MANIFEST_BYTES, hint=EXPORT_HINT), path)


def parse_manifest(document: object, path: Path | str) -> Manifest:
    """Validate a manifest; errors as above, which name `path` as its place: a plan's sidecar embeds one, too."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UserError(f'{path}: "format" is not {FORMAT!r}', EXPORT_HINT)
    version = document.get("format_version")
    if type(version) is not int or version < 1:
        raise UserError(f"{path}: format_version {stated(document, 'format_version')}", EXPORT_HINT)
    if version > FORMAT_VERSION:
        raise UserError(
            f"{path}: format version {version} is newer than {FORMAT_VERSION}, the one this runtime reads",
            "update medusa-engine, or export the model with this version",
        )
    if version < FORMAT_VERSION:
        raise UserError(
            f"{path}: format version {version} is older than {FORMAT_VERSION}, the one this runtime reads", EXPORT_HINT
        )
    unsigned = {name: value for name, value in document.items() if name != "sha256"}
    if document.get("sha256") != document_sha256(unsigned):
        raise UserError(f"{path}: changed since the export (its sha256 differs)", COPY_HINT)

    def field_of(name: str, kind: type) -> Any:
        if not isinstance(document.get(name), kind):
            raise UserError(f'{path}: "{name}" {stated(document, name)}', EXPORT_HINT)
        return document[name]

    target, dtype = field_of("target", str), field_of("dtype", str)
    weights = field_of("weights", str)
    for name, value, known in (
        ("target", target, TARGET_DTYPES),
        ("dtype", dtype, TARGET_DTYPES.get(target, ())),
        ("weights", weights, WEIGHT_FORMATS.get(dtype, ())),
    ):
        if value not in known:
            raise UserError(f'{path}: "{name}" is {shown(value)}', EXPORT_HINT)
    policies = _policies(field_of("policies", list), path)
    penalty = field_of("repetition_penalty", bool)
    names = graph_names(policies, repetition_penalty=penalty, target=target)
    graphs = _graphs(field_of("graphs", dict), names, path)
    files = listed_files(field_of("files", dict), path, EXPORT_HINT)
    trees = _trees(field_of("trees", list), path)
    for name in (*graphs.values(), WEIGHTS_NAME, *trees, GENERATION_NAME):
        if name not in files:  # it would be used without having been verified
            raise UserError(f'{path}: "files" does not list {shown(name)}', EXPORT_HINT)
    return Manifest(
        name=field_of("name", str),
        target=target,
        dtype=dtype,
        weights=weights,
        limits=parse_limits(field_of("limits", dict), target, path),
        model=field_of("model", dict),
        heads=field_of("heads", dict),
        tools=field_of("tools", dict),
        graphs=graphs,
        files=files,
        policies=policies,
        repetition_penalty=penalty,
        trees=trees,
    )


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def document_sha256(document: Mapping[str, Any]) -> str:
    """Hex sha256 of a manifest in a canonical form, without the `sha256` it carries itself."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def cache_rows(target: str, max_length: int, depth: int, max_tree_nodes: int) -> int:
    """The fewest S_max: the compaction body writes D+1+N rows at P, of which D+1 may lie behind the last that is used.

    With fixed shapes N is `max_tree_nodes` at the end of the cache, too.
    """
    return max_length + depth + 1 + (max_tree_nodes if target == TENSORRT else 0)


def parse_limits(values: Mapping[str, Any], target: str, path: Path | str) -> Limits:
    """Validate the limits of a bundle for a target; errors as above, which name `path` as their place."""
    values = {"lookup": 0, **values}  # bundles that were exported before there was lookup have none
    expected = {field.name for field in fields(Limits)}
    for name in expected:
        value = values.get(name)
        least = 0 if name == "lookup" or (name == "heads" and values["lookup"]) else 1
        if type(value) is not int or not least <= value < LARGEST_LIMIT:
            raise UserError(f'{path}: "limits.{name}" {stated(values, name)}', EXPORT_HINT)
    limits = Limits(**{name: values[name] for name in expected})
    least = cache_rows(target, limits.max_length, limits.depth, limits.max_tree_nodes)
    if limits.cache_rows < least:
        raise UserError(
            f'{path}: "limits.cache_rows" is {limits.cache_rows}; the limits need at least {least}', EXPORT_HINT
        )
    if limits.layers > MOST_LAYERS or limits.cache_elements > _MOST_CACHE_ELEMENTS:
        raise UserError(
            f'{path}: "limits" ask for a cache of {counted(limits.layers, "layer")}, {limits.cache_elements} numbers',
            EXPORT_HINT,
        )
    return limits


def _policies(values: list[Any], path: Path | str) -> tuple[str, ...]:
    if GREEDY not in values or not all(value in POLICIES for value in values):
        raise UserError(f'{path}: "policies" is {shown(values)}', EXPORT_HINT)
    return tuple(values)


def _trees(values: list[Any], path: Path | str) -> tuple[str, ...]:
    if not values or not all(isinstance(value, str) for value in values) or len(set(values)) < len(values):
        raise UserError(f'{path}: "trees" is {shown(values)}', EXPORT_HINT)
    return tuple(values)


def _graphs(values: Mapping[str, Any], names: Iterable[str], path: Path | str) -> dict[str, str]:
    graphs: dict[str, str] = {}
    for name in names:
        if not isinstance(values.get(name), str):
            raise UserError(f'{path}: "graphs.{name}" {stated(values, name)}', EXPORT_HINT)
        check_plain_name(values[name], path, EXPORT_HINT)
        if not values[name].endswith(GRAPH_SUFFIX):  # ONNX Runtime goes by the ending, and reads other formats too
            raise UserError(f'{path}: "graphs.{name}" is {shown(values[name])}, no {GRAPH_SUFFIX} file', EXPORT_HINT)
        graphs[name] = values[name]
    return graphs
