"""From a checked network to the bytes of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from medusa_engine.exporter import timing_cache
from medusa_engine.exporter.build_log import essence, native_work
from medusa_engine.exporter.build_settings import BuildSettings
from medusa_engine.exporter.plan_io import FREE
from medusa_engine.exporter.plan_network import Network
from medusa_engine.plugins.compact_append_kv.tensorrt_plugin import allow_aliasing, plugin_layers
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import Limits
from medusa_engine.runtime.plan import DECODE, PREFILL, Profile

FUSED, DECOMPOSED = "fused", "decomposed"
_NOT_FUSED = "not supported by a dedicated kernel"  # and the attention is not marked decomposable
_FULLEST = "--verbose shows all that the library says"


@dataclass(frozen=True)
class Built:
    """A plan in memory.

    Attributes:
        plan: its bytes, as a buffer.
        attention: FUSED, or DECOMPOSED: some attention has no kernel of its own, and is made of several.
        notes: what the user should know, a line each.
    """

    plan: Any
    attention: str
    notes: tuple[str, ...]


def plan_profiles(limits: Limits, max_prefill_chunk: int) -> tuple[Profile, ...]:
    """`decode`: a whole round; `prefill`: a prompt chunk, or one row of a plain step, with its last row's logits."""
    nodes, chunk = limits.max_tree_nodes, min(max_prefill_chunk, limits.max_length)
    return (
        Profile(DECODE, rows=(nodes, nodes, nodes), logit_rows=(nodes, nodes, nodes)),
        Profile(PREFILL, rows=(1, chunk, chunk), logit_rows=(1, 1, 1)),
    )


def build_network(network: Network, profiles: Sequence[Profile], capability: str, settings: BuildSettings) -> Built:
    """Build for a compute capability.

    An attention that the library has no kernel for is decomposed, which costs time in each round: a note says so.

    Raises:
        UserError: the library refuses; with its reason and the node it names.
    """
    library = network.library
    notes: list[str] = []
    config = network.builder.create_builder_config()
    _configure(config, network, capability, settings)
    for profile in profiles:
        _add_profile(config, network, profile)
    if settings.timing_cache is not None and library.has_timing_caches:
        data = timing_cache.read_timing_cache(settings.timing_cache)
        reason = timing_cache.attach_timing_cache(config, data, network.messages)
        if reason is not None:
            notes.append(f"{settings.timing_cache}: the timing cache is not used: {reason}")

    attentions = network.attentions
    for attention in attentions:
        attention.decomposable = False
    kind, plan = FUSED, _build(network, config, settings)
    refusals = [text for text in network.messages.errors if _NOT_FUSED in text]
    if plan is None and refusals and attentions:
        network.messages.errors.clear()
        for attention in attentions:
            attention.decomposable = True
        kind, plan = DECOMPOSED, _build(network, config, settings)
        tensors = next((text for text in network.messages.nodes.values() if text.startswith("Attention ")), "Attention")
        notes.append(f"{library.label} has no fused kernel for {tensors}: it is decomposed, which is slower")
    if plan is None:
        raise UserError(f"{library.label} does not build the plan: {network.messages.essence()}", _FULLEST)
    if settings.timing_cache is not None and library.has_timing_caches:
        reason = timing_cache.write_timing_cache(config, settings.timing_cache)
        if reason is not None:
            notes.append(f"{settings.timing_cache}: the timing cache is not written: {reason}")
    return Built(plan, kind, tuple(notes))


def _build(network: Network, config: Any, settings: BuildSettings) -> Any | None:
    try:
        with native_work(verbose=settings.verbose):
            return network.builder.build_serialized_network(network.definition, config)
    except (RuntimeError, MemoryError) as error:
        network.messages.errors.append(f"{type(error).__name__}: {essence(str(error))}")
        return None


def _configure(config: Any, network: Network, capability: str, settings: BuildSettings) -> None:
    library, module = network.library, network.library.module
    target = library.capabilities.get(capability)
    if target is None and library.capabilities:
        target = module.ComputeCapability.CURRENT  # the GPU here, which the library may know under no name
    if target is not None:
        config.num_compute_capabilities = 1
        if not config.set_compute_capability(target, 0):
            raise UserError(f"{library.label} refuses compute capability {capability}", _FULLEST)
    if settings.workspace_mib is not None:
        config.set_memory_pool_limit(module.MemoryPoolType.WORKSPACE, settings.workspace_mib << 20)
    if settings.version_compatible:
        config.set_flag(module.BuilderFlag.VERSION_COMPATIBLE)
    if hasattr(module.BuilderFlag, "REQUIRE_USER_ALLOCATION"):  # no allocation in a pass: it is captured in a graph
        config.set_flag(module.BuilderFlag.REQUIRE_USER_ALLOCATION)
    if plugin_layers(module, network.definition):
        allow_aliasing(module, config)


def _add_profile(config: Any, network: Network, profile: Profile) -> None:
    made = network.builder.create_optimization_profile()
    for tensor in network.inputs:
        if FREE in tuple(tensor.shape):
            sizes = profile.logit_rows if tensor.name == "logit_rows" else profile.rows
            shapes = [[size if extent == FREE else extent for extent in tensor.shape] for size in sizes]
            made.set_shape(tensor.name, *shapes)  # min, opt, max
    if config.add_optimization_profile(made) < 0:
        raise UserError(
            f"{network.library.label} refuses the profile {profile.name}, rows {list(profile.rows)}:"
            f" {network.messages.essence()}",
            _FULLEST,
        )
