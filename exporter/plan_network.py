"""From a graph file to a network that may be built: parsed, and checked against the manifest."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_engine.exporter.build_log import Messages, essence, logger, native_work
from medusa_engine.exporter.builder_library import Library
from medusa_engine.exporter.plan_io import differences
from medusa_engine.plugins.compact_append_kv.tensorrt_plugin import plugin_layers
from medusa_engine.runtime.counted import counted
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.plan import Tensor

_DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT64": "int64", "BOOL": "bool"}
_UNUSED = re.compile(r"Unused Input: (?P<input>\S+)|Input Tensor (?P<tensor>\S+) is unused")
_EXPORT_HINT = "export the model again with this version of medusa-export, then build the plan again"


@dataclass(frozen=True)
class Network:
    """A parsed graph.

    Attributes:
        library: that parsed it.
        builder, definition: its objects.
        parser: owns the weights while the network lives.
        messages: what the library says about it.
    """

    library: Library
    builder: Any
    definition: Any
    parser: Any
    messages: Messages

    @property
    def inputs(self) -> list[Any]:
        return [self.definition.get_input(place) for place in range(self.definition.num_inputs)]

    @property
    def outputs(self) -> list[Any]:
        return [self.definition.get_output(place) for place in range(self.definition.num_outputs)]

    @property
    def io(self) -> tuple[Tensor, ...]:
        """The tensors as the library has them."""
        modes = (("input", self.inputs), ("output", self.outputs))
        return tuple(
            Tensor(tensor.name, mode, _dtype(tensor.dtype), tuple(tensor.shape))
            for mode, tensors in modes
            for tensor in tensors
        )

    @property
    def attentions(self) -> list[Any]:
        """The attention operators; the library gives one of their layers in a class that does not show them."""
        module = self.library.module
        kind = getattr(module.LayerType, "ATTENTION_INPUT", None)
        layers = (self.definition.get_layer(place) for place in range(self.definition.num_layers))
        found = [layer for layer in layers if kind is not None and layer.type == kind]
        for layer in found:
            layer.__class__ = module.IAttentionInputLayer
        return [layer.attention for layer in found]


def parse_graph(library: Library, path: Path, *, verbose: bool) -> Network:
    """Parse an ONNX file, which may have its weights beside it.

    Raises:
        UserError: the library does not start or refuses the graph; names the first node it refuses.
    """
    module = library.module
    log = logger(module)
    log.messages.clear(verbose=verbose)
    with native_work(verbose=verbose):
        try:
            builder = module.Builder(log)
            typed = getattr(module.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
            definition = builder.create_network(0 if typed is None else 1 << int(typed))
            parser = module.OnnxParser(definition, log)
        except (TypeError, RuntimeError) as error:  # a constructor that returned nothing
            raise UserError(
                f"{library.label} does not start: {log.messages.essence() if log.messages.errors else error}",
                "it needs an NVIDIA driver; --flavor tensorrt-rtx builds without a GPU",
            ) from error
        parsed = parser.parse_from_file(str(path))
    if not parsed or parser.num_errors:
        refusals = [
            _refusal(parser.get_error(place), log.messages.nodes, library) for place in range(parser.num_errors)
        ]
        if verbose:
            print(*refusals, sep="\n", file=sys.stderr)
        more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
        raise UserError(
            f"{path}: {refusals[0] if refusals else log.messages.essence()}{more}",
            "--verbose shows all that the library says; another version of it may take the graph",
        )
    return Network(library, builder, definition, parser, log.messages)


def check_network(network: Network, path: Path, expected: Sequence[Tensor]) -> None:
    """Refuse a network that is not the manifest's round, or that would need its inputs on the host.

    Raises:
        UserError: names the tensors.
    """
    _refuse_unused(_unused_inputs(network), path)
    for tensor in network.inputs:
        if tensor.is_shape_tensor:
            raise UserError(
                f"{path}: the input {tensor.name} became a shape tensor: the host would have to read it in each round",
                _EXPORT_HINT,
            )
    phrases = differences(expected, network.io)
    if phrases:
        more = f", and {len(phrases) - 2} more" if len(phrases) > 2 else ""
        raise UserError(f"{path}: not the manifest's round: {', '.join(phrases[:2])}{more}", _EXPORT_HINT)


def check_compaction(network: Network, path: Path, *, expected: int) -> None:
    """Refuse a network with another number of plugin layers: that of the model's layers, 0 without the plugin.

    Raises:
        UserError: names both.
    """
    found = plugin_layers(network.library.module, network.definition)
    if found != expected:
        raise UserError(
            f"{path}: the compaction plugin is used by {counted(found, 'layer')}, not by {expected}",
            "build with --no-plugin" if expected else "build in a process that has not registered the plugin",
        )


def check_used(messages: Messages, path: Path) -> None:
    """Refuse a graph of which the library says, as it does while it builds, that an input is not used.

    Raises:
        UserError: names the inputs.
    """
    found = [match for text in messages.warnings if (match := _UNUSED.search(text))]
    _refuse_unused([match["input"] or match["tensor"] for match in found], path)


def _refuse_unused(names: Sequence[str], path: Path) -> None:
    if names:
        raise UserError(f"{path}: inputs that nothing uses: {', '.join(sorted(set(names)))}", _EXPORT_HINT)


def _unused_inputs(network: Network) -> list[str]:
    """Inputs that no output depends on."""
    definition = network.definition
    sources: dict[str, list[str]] = {}  # tensor -> those that its layer reads
    for place in range(definition.num_layers):
        layer = definition.get_layer(place)
        read = [layer.get_input(index) for index in range(layer.num_inputs)]
        names = [tensor.name for tensor in read if tensor is not None]
        sources |= {layer.get_output(index).name: names for index in range(layer.num_outputs)}
    open_names, reached = [tensor.name for tensor in network.outputs], set()
    while open_names:
        name = open_names.pop()
        if name not in reached:
            reached.add(name)
            open_names += sources.get(name, [])
    return [tensor.name for tensor in network.inputs if tensor.name not in reached]


def _refusal(error: Any, nodes: dict[str, str], library: Library) -> str:
    name, operator, text = error.node_name(), error.node_operator(), essence(error.desc())
    if error.code().name.startswith("UNSUPPORTED_NODE"):
        text = "operator not supported" + (f": {text}" if text != "false" else "")
    if not operator:  # the file as a whole
        return f"{library.label} does not parse it: {text}"
    where = "".join(f" in {outer}" for outer in error.local_function_stack())
    return f"node {name} ({nodes.get(name, operator)}){where}: {text}"


def _dtype(dtype: Any) -> str:
    name = str(dtype.name)
    return _DTYPES.get(name, name.lower())
