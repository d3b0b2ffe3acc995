"""A TensorRT plan on disk: the sidecar that says what it is, and the checks that come before it is deserialised."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from medusa_engine.runtime.bundle_files import verify_file
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.listed_files import listed_files
from medusa_engine.runtime.manifest import (
    GENERATION_NAME,
    Manifest,
    document_sha256,
    graph_name,
    parse_manifest,
)
from medusa_engine.runtime.policy import GREEDY, POLICIES, REJECTION
from medusa_engine.runtime.strict_json import read_json, shown, stated

FORMAT = "medusa-plan"
FORMAT_VERSION = 1
TENSORRT, TENSORRT_RTX = "tensorrt", "tensorrt-rtx"
FLAVORS = (TENSORRT, TENSORRT_RTX)
COMPACTIONS = ("plugin", "function")
DECODE, PREFILL = "decode", "prefill"
PROFILES = (DECODE, PREFILL)  # the number of a profile in the plan is its place here
ACCEPTANCES = tuple(policy for policy in POLICIES if policy != REJECTION)
DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1}  # bytes of an element

_MAX_SIDECAR_BYTES = 2 << 20  # it embeds a manifest
_LARGEST = 1 << 31


@dataclass(frozen=True)
class Profile:
    """An optimization profile: [min, opt, max] of the packed rows N and of the rows with logits R."""

    name: str
    rows: tuple[int, int, int]
    logit_rows: tuple[int, int, int]


@dataclass(frozen=True)
class Tensor:
    """An input or output of the plan; a dimension that the profiles bound is -1. dtype is one of DTYPES."""

    name: str
    mode: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """What `NAME.plan.json` says of `NAME.plan`.

    Attributes:
        flavor: of the library that built it, one of FLAVORS.
        library_version: of that library, as its `__version__` says: a plan runs on the version that built it.
        compute_capability: of the GPUs it runs on: "8.9".
        graph: the bundle's graph that it was built from: `round.sample`.
        acceptance: that graph's policy, one of ACCEPTANCES.
        bundle: the manifest of the bundle.
        graph_sha256: of that graph's file.
        profiles: `decode`, `prefill`.
        compaction: "plugin" or "function", the body of standard operators.
        builder: flags of the build; `version_compatible` (bool) is always among them.
        io: every input and output.
        plan: {"bytes": int, "sha256": hex} of the plan itself.
        files: file name -> {"bytes", "sha256"} of every file in `NAME.plan.files`.
    """

    flavor: str
    library_version: str
    compute_capability: str
    graph: str
    acceptance: str
    bundle: Manifest
    graph_sha256: str
    profiles: tuple[Profile, ...]
    compaction: str
    builder: Mapping[str, Any]
    io: tuple[Tensor, ...]
    plan: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]

    @property
    def policies(self) -> tuple[str, ...]:
        """Acceptance policies that it runs: its own and greedy, which every one can amount to."""
        return (GREEDY,) if self.acceptance == GREEDY else (GREEDY, self.acceptance)

    @property
    def max_prefill_chunk(self) -> int:
        """Most rows of a prompt chunk."""
        return self.profiles[PROFILES.index(PREFILL)].rows[2]

    @property
    def version_compatible(self) -> bool:
        return bool(self.builder["version_compatible"])

    def document(self) -> dict[str, Any]:
        """The JSON form, format, version and its own sha256 included."""
        document = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        document["bundle"] = self.bundle.document()
        return document | {"sha256": document_sha256(document)}


def sidecar_path(path: Path) -> Path:
    """`NAME.plan.json` of `NAME.plan`."""
    return path.with_name(f"{path.name}.json")


def files_folder(path: Path) -> Path:
    """`NAME.plan.files` of `NAME.plan`: what the runtime reads beside the graph."""
    return path.with_name(f"{path.name}.files")


def write_plan(path: Path, plan: Plan) -> None:
    """Write the sidecar of the plan at `path`; the plan and its files are there already."""
    sidecar_path(path).write_text(json.dumps(plan.document(), indent=1) + "\n", encoding="ascii")


def build_command(path: Path, plan: Plan | None = None, *, compute_capability: str | None = None) -> str:
    """The `medusa-build` command that writes the plan again, as it was built or for another GPU.

    The folder is a guess: the sidecar knows the bundle's name only.
    """
    if plan is None:
        return f"medusa-build engines/NAME -o {path}"
    words = [f"medusa-build engines/{plan.bundle.name} -o {path} --flavor {plan.flavor}"]
    words.append(f"--compute-capability {compute_capability or plan.compute_capability}")
    if plan.acceptance != GREEDY:
        words.append(f"--acceptance {plan.acceptance}")
    if plan.version_compatible:
        words.append("--version-compatible")
    if path.exists():
        words.append("--force")
    return " ".join(words)


def read_plan(path: Path) -> Plan:
    """Read and validate the sidecar of the plan at `path`; the plan and the other files are not opened.

    Raises:
        UserError: there is no such plan or no sidecar, another format version, changed, or a field that is missing or
            of the wrong kind.
    """
    sidecar, hint = sidecar_path(path), f"build the plan again: {build_command(path)}"
    if not path.is_file():
        what = "it is not a file" if path.exists() else "there is no such file"
        raise UserError(f"{path}: {what}", f"give the plan that medusa-build wrote, or build it: {build_command(path)}")
    if not sidecar.is_file():
        raise UserError(
            f"{path}: no {sidecar.name} beside it, which says what the plan is",
            f"copy it with the plan, and {files_folder(path).name}, or {hint}",
        )
    try:
        return _parse_plan(read_json(sidecar, max_bytes=_MAX_SIDECAR_BYTES, hint=hint), sidecar, hint)
    except UserError as error:  # of the embedded manifest: exporting alone mends nothing here
        raise UserError(error.problem, error.hint if "medusa-build" in error.hint else hint) from error


def check_plan_files(path: Path, plan: Plan, *, hashes: bool = True) -> None:
    """Compare the plan and every file in its folder with the sidecar.

    Args:
        hashes: also read the files and compare sha256; sizes alone otherwise.

    Raises:
        UserError: a file is missing, of another size, or of other content; names it and the command that mends it.
    """
    hint = f"copy the plan and all beside it again, or build it again: {build_command(path, plan)}"
    named: dict[str, Any] = {"hashes": hashes, "listed_in": sidecar_path(path).name, "made": "the build", "hint": hint}
    for name, facts in plan.files.items():
        verify_file(files_folder(path) / name, facts, **named)
    verify_file(path, plan.plan, **named)


def _parse_plan(document: object, path: Path, hint: str) -> Plan:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UserError(f'{path}: "format" is not {FORMAT!r}', hint)
    version = document.get("format_version")
    if type(version) is not int or version < 1:
        raise UserError(f"{path}: format_version {stated(document, 'format_version')}", hint)
    if version != FORMAT_VERSION:
        age = "newer" if version > FORMAT_VERSION else "older"
        mend = f"update medusa-engine, or {hint}" if version > FORMAT_VERSION else hint
        raise UserError(
            f"{path}: format version {version} is {age} than {FORMAT_VERSION}, the one this runtime reads", mend
        )
    unsigned = {name: value for name, value in document.items() if name != "sha256"}
    if document.get("sha256") != document_sha256(unsigned):
        raise UserError(f"{path}: changed since the build (its sha256 differs)", hint)

    def refuse(name: str, words: str) -> UserError:
        return UserError(f'{path}: "{name}" {words}', hint)

    def field_of(name: str, kind: type) -> Any:
        if not isinstance(document.get(name), kind):
            raise refuse(name, stated(document, name))
        return document[name]

    def one_of(name: str, values: tuple[str, ...]) -> str:
        if document.get(name) not in values:
            raise refuse(name, stated(document, name))
        return str(document[name])

    acceptance = one_of("acceptance", ACCEPTANCES)
    capability = field_of("compute_capability", str)
    if not re.fullmatch(r"[0-9]{1,2}\.[0-9]", capability):
        raise refuse("compute_capability", stated(document, "compute_capability"))
    bundle = parse_manifest(field_of("bundle", dict), f"{path}: bundle")
    files = listed_files(field_of("files", dict), path, hint)
    for name in (*bundle.trees, GENERATION_NAME):
        if name not in files:  # it would be used without having been verified
            raise UserError(f'{path}: "files" does not list {shown(name)}', hint)
    builder = field_of("builder", dict)
    if type(builder.get("version_compatible")) is not bool:
        raise refuse("builder.version_compatible", stated(builder, "version_compatible"))
    return Plan(
        flavor=one_of("flavor", FLAVORS),
        library_version=field_of("library_version", str),
        compute_capability=capability,
        graph=one_of("graph", (graph_name("round", acceptance),)),
        acceptance=acceptance,
        bundle=bundle,
        graph_sha256=field_of("graph_sha256", str),
        profiles=_profiles(field_of("profiles", list), bundle, refuse),
        compaction=one_of("compaction", COMPACTIONS),
        builder=builder,
        io=tuple(_tensor(value, refuse) for value in field_of("io", list)),
        plan=listed_files({"plan": field_of("plan", dict)}, path, hint)["plan"],
        files=files,
    )


def _profiles(values: list[Any], bundle: Manifest, refuse: Callable[[str, str], UserError]) -> tuple[Profile, ...]:
    if [value.get("name") for value in values if isinstance(value, dict)] != list(PROFILES):
        raise refuse("profiles", f"do not name {' and '.join(PROFILES)}")
    profiles = []
    for value in values:
        ranges = {}
        for name in ("rows", "logit_rows"):
            sizes = value.get(name)
            whole = isinstance(sizes, list) and all(type(size) is int and 0 < size < _LARGEST for size in sizes)
            if not whole or len(sizes) != 3 or sizes != sorted(sizes):
                raise refuse(f"profiles.{value['name']}.{name}", stated(value, name))
            ranges[name] = (sizes[0], sizes[1], sizes[2])
        profiles.append(Profile(value["name"], **ranges))
    nodes = bundle.limits.max_tree_nodes
    decode, prefill = profiles
    if decode.rows[2] != nodes or decode.logit_rows[2] != nodes:
        raise refuse("profiles.decode.rows", f"do not end at the {counted(nodes, 'node')} of the bundle")
    if prefill.rows[0] != 1 or prefill.logit_rows[0] != 1:
        raise refuse("profiles.prefill.rows", "do not begin at 1")
    return tuple(profiles)


def _tensor(value: object, refuse: Callable[[str, str], UserError]) -> Tensor:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise refuse("io", f"names no tensor in {shown(value)}")
    name, shape = value["name"], value.get("shape")
    if value.get("mode") not in ("input", "output"):
        raise refuse(f"io.{name}.mode", stated(value, "mode"))
    if value.get("dtype") not in DTYPES:
        raise refuse(f"io.{name}.dtype", stated(value, "dtype"))
    if not isinstance(shape, list) or not all(type(size) is int and -1 <= size < _LARGEST for size in shape):
        raise refuse(f"io.{name}.shape", stated(value, "shape"))
    return Tensor(name, value["mode"], value["dtype"], tuple(shape))
