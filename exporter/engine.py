"""From a bundle to a plan; no torch, no onnx."""

from __future__ import annotations

import hashlib
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_engine.exporter import plan_files
from medusa_engine.exporter.build_settings import BuildSettings
from medusa_engine.exporter.builder_library import Library, choose_capability, gpu_capability, load_library
from medusa_engine.exporter.plan_build import Built, build_network, plan_profiles
from medusa_engine.exporter.plan_io import plan_io
from medusa_engine.exporter.plan_network import check_compaction, check_network, check_used, parse_graph
from medusa_engine.exporter.self_test import self_test
from medusa_engine.exporter.stage import stage
from medusa_engine.plugins.compact_append_kv.tensorrt_plugin import register_plugin
from medusa_engine.runtime.bundle_files import verify_files
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.generation_config import read_stop_token_ids
from medusa_engine.runtime.manifest import GENERATION_NAME, TENSORRT, Manifest, graph_name, read_manifest
from medusa_engine.runtime.plan import PREFILL, PROFILES, Plan, Profile, files_folder, write_plan
from medusa_engine.runtime.tree import load_tree

_FIRST_BF16 = (8, 0)  # compute capability


@dataclass(frozen=True)
class BuildReport:
    """What was built.

    Attributes:
        path: of the plan.
        plan: its sidecar.
        library: what built it, with its version.
        has_plugins: whether that can take the compaction plugin.
        parse_seconds, build_seconds: wall time.
        peak_bytes: most memory that the process has held.
        self_test: its result in a few words.
        notes: what the user should know, a line each.
    """

    path: Path
    plan: Plan
    library: str
    has_plugins: bool
    parse_seconds: float
    build_seconds: float
    peak_bytes: int
    self_test: str
    notes: tuple[str, ...]


def build(settings: BuildSettings) -> BuildReport:
    """Build the plan and put it in place; progress goes to standard error.

    Raises:
        UserError: see `medusa-build`; what was at the output is still there then.
    """
    settings.check()
    path = settings.plan_path
    plan_files.check_plan_target(path, force=settings.force)
    manifest = read_manifest(settings.bundle)
    graph = _graph_of(settings, manifest)
    library = load_library(settings.flavor)
    gpu = gpu_capability()
    capability = choose_capability(library, settings.compute_capability, gpu)
    notes = _refuse_what_the_library_lacks(library, settings)
    _check_dtype(manifest, capability)
    with stage("verifying the bundle", decimals=1):
        verify_files(settings.bundle, manifest)
    graph_file = manifest.graphs[graph]
    graph_path = settings.bundle / graph_file
    stop_ids = read_stop_token_ids(settings.bundle / GENERATION_NAME)
    io = plan_io(manifest, settings.acceptance, len(stop_ids))
    profiles = plan_profiles(manifest.limits, settings.max_prefill_chunk)

    started = time.perf_counter()
    with stage(f"parsing {graph_file}", decimals=1):
        plugin = settings.plugin and library.has_plugins
        if plugin:  # before the parser looks for it
            register_plugin(library.module, capability)
        network = parse_graph(library, graph_path, verbose=settings.verbose)
        check_network(network, graph_path, io)
        check_compaction(network, graph_path, expected=manifest.limits.layers if plugin else 0)
    parsed = time.perf_counter()
    with stage(f"building with {library.label} for compute capability {capability}", decimals=1):
        built = build_network(network, profiles, capability, settings)
        check_used(network.messages, graph_path)
    build_seconds = time.perf_counter() - parsed

    with plan_files.new_plan(path, force=settings.force) as place:
        with stage("writing the plan", decimals=1):
            plan_files.copy_companions(settings.bundle, manifest, files_folder(place))
            place.write_bytes(built.plan)
            plan = Plan(
                flavor=library.flavor,
                library_version=library.version,
                compute_capability=capability,
                graph=graph,
                acceptance=settings.acceptance,
                bundle=manifest,
                graph_sha256=manifest.files[graph_file]["sha256"],
                profiles=profiles,
                compaction="plugin" if plugin else "function",
                builder=_builder_document(settings, built, profiles),
                io=io,
                plan={"bytes": built.plan.nbytes, "sha256": hashlib.sha256(built.plan).hexdigest()},
                files={name: manifest.files[name] for name in plan_files.companion_names(manifest)},
            )
            write_plan(place, plan)
        tested = _self_test(place, plan, graph_path, gpu)
    return BuildReport(
        path=path,
        plan=plan,
        library=library.label,
        has_plugins=library.has_plugins,
        parse_seconds=parsed - started,
        build_seconds=build_seconds,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # it counts KiB
        self_test=tested,
        notes=(*notes, *built.notes),
    )


def _graph_of(settings: BuildSettings, manifest: Manifest) -> str:
    """Name of the graph that becomes the plan."""
    if manifest.target != TENSORRT:
        raise UserError(
            f"{settings.bundle}: a bundle for {manifest.target}, whose shapes are not fixed",
            f"export the model again with medusa-export --target {TENSORRT} --precision fp16",
        )
    if settings.acceptance not in manifest.policies:
        raise UserError(
            f"{settings.bundle}: the bundle was exported without --acceptance {settings.acceptance}",
            f"choose {' or '.join(manifest.policies)}, or export the model with --acceptance {settings.acceptance}",
        )
    return graph_name("round", settings.acceptance)


def _refuse_what_the_library_lacks(library: Library, settings: BuildSettings) -> list[str]:
    """Notes of options that change nothing; an option that cannot be kept is refused."""
    if settings.version_compatible and not library.has_lean_runtime:
        raise UserError(
            f"{library.label} has no --version-compatible plans: it comes without the lean runtime they embed",
            "leave it out, or build with --flavor tensorrt",
        )
    if settings.timing_cache is not None and not library.has_timing_caches:
        return [f"{library.label} keeps no timing caches: --timing-cache {settings.timing_cache} changes nothing"]
    return []


def _check_dtype(manifest: Manifest, capability: str) -> None:
    major, minor = capability.split(".")
    if manifest.dtype == "bfloat16" and (int(major), int(minor)) < _FIRST_BF16:
        raise UserError(
            f"compute capability {capability} has no bfloat16, the precision of this bundle",
            "export the model again with medusa-export --precision fp16",
        )


def _builder_document(settings: BuildSettings, built: Built, profiles: Sequence[Profile]) -> dict[str, Any]:
    """What else the build was given and gave; of the options those that shape the plan."""
    return {
        "workspace_mib": settings.workspace_mib,
        "version_compatible": settings.version_compatible,
        "max_prefill_chunk": profiles[PROFILES.index(PREFILL)].rows[2],
        "attention": built.attention,
    }


def _self_test(path: Path, plan: Plan, graph: Path, gpu: str | None) -> str:
    """The result of the self-test, or why it was not run."""
    if gpu is None:
        return "not run: there is no GPU here"
    if gpu != plan.compute_capability:
        return f"not run: the GPU here has compute capability {gpu}"
    with stage("running rounds of the plan beside its graph", decimals=1):
        return self_test(path, plan, graph, load_tree(files_folder(path) / plan.bundle.trees[0]))
