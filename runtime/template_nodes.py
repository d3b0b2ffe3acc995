"""Rewrite a template before it is compiled, so that it counts its steps and has what it makes measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError

MOST_SOURCE = 1 << 17  # characters: the templates of released models have at most some 30,000
MOST_TAGS = 1 << 12
MOST_NODES = 1 << 14  # of the syntax tree

_BODIES: Any = (nodes.For, nodes.Macro, nodes.CallBlock)
_BUFFERED: Any = (nodes.AssignBlock, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.Block)


def rewrite(template: nodes.Template) -> None:
    """Let a template call the `step`, `held`, `joined` and `compared` of its environment.

    `step(n)` comes first in the body of every loop and macro, n being the characters of plain text in it where the
    text is not written at once; `held` gets every value that is made without a call, `joined` the parts of a `~`,
    `compared` the first operand of comparisons that can be long.

    Raises:
        SecurityError: the template is so long that compiling it would take seconds.
    """
    everything: list[Any] = list(template.find_all(nodes.Node))
    if len(everything) > MOST_NODES:
        raise SecurityError("the template is too long")
    buffered = {id(inner) for node in template.find_all(_BUFFERED) for inner in (node, *node.find_all(_BODIES))}
    for node in everything:
        if isinstance(node, nodes.AssignBlock):
            _hold_block(node)
        if isinstance(node, nodes.For) and node.test is not None:
            counted = nodes.Not(_call("step", [nodes.Const(0)], node))
            node.test = nodes.And(counted, node.test).set_lineno(node.lineno)
    for node in template.find_all(_BODIES):
        later = id(node) in buffered or (isinstance(node, nodes.For) and node.recursive)
        plain = sum(len(text.data) for text in node.find_all(nodes.TemplateData)) if later else 0
        node.body.insert(0, nodes.Output([_call("step", [nodes.Const(plain)], node)]).set_lineno(node.lineno))
    for node in everything:
        if isinstance(node, nodes.Compare) and not _is_short(node):
            node.expr = _call("compared", [node.expr], node)
    calls: dict[int, nodes.Call] = {}  # by the id of the node whose place they take
    for node in everything:
        if isinstance(node, nodes.Concat):
            calls[id(node)] = _call("joined", node.nodes, node)
        elif _makes_a_value(node):
            calls[id(node)] = _call("held", [node], node)
    for parent in (template, *list(template.find_all(nodes.Node))):
        _replace(parent, calls)
    for node in everything:
        if isinstance(node, nodes.Concat):
            calls[id(node)].args = node.nodes


def _call(name: str, arguments: list[nodes.Expr], at: nodes.Node) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
    call.set_lineno(at.lineno)
    return call


def _makes_a_value(node: nodes.Node) -> bool:
    """Whether a node makes a list, a mapping, or a text from others; those of constants are as long as the source."""
    if isinstance(node, nodes.Tuple) and node.ctx != "load":
        return False
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Slice) and node.ctx == "load"
    return isinstance(node, (nodes.List, nodes.Tuple, nodes.Dict)) and not _is_constant(node)


def _is_constant(node: nodes.Node) -> bool:
    if isinstance(node, (nodes.List, nodes.Tuple, nodes.Dict)):
        return all(_is_constant(part) for part in _parts(node))
    return isinstance(node, nodes.Const)


def _parts(node: nodes.List | nodes.Tuple | nodes.Dict) -> Iterator[nodes.Node]:
    for item in node.items:
        yield from (item.key, item.value) if isinstance(item, nodes.Pair) else (item,)


def _is_short(node: nodes.Compare) -> bool:
    """Whether each operator compares with what stands in the source."""
    return len(node.ops) == 1 and (
        _is_constant(node.ops[0].expr) or (_is_constant(node.expr) and node.ops[0].op not in ("in", "notin"))
    )


def _hold_block(node: nodes.AssignBlock) -> None:
    """Give what `{% set %}` gathers through a filter, which is measured."""
    if node.filter is None:
        node.filter = nodes.Filter(None, "string", [], [], None, None)
        node.filter.set_lineno(node.lineno)


def _replace(parent: nodes.Node, new: Mapping[int, nodes.Node]) -> None:
    """Put other nodes into the places of some of a node's own, which are given by id."""
    for field, value in parent.iter_fields():
        if isinstance(value, list):
            setattr(parent, field, [new.get(id(item), item) for item in value])
        else:
            setattr(parent, field, new.get(id(value), value))
