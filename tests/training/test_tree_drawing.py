"""Drawings have every node once, apart from one another, with its rank and probability, in SVG, PNG and text."""

from __future__ import annotations

import io
import itertools
import struct
import xml.etree.ElementTree as ElementTree
import zlib
from pathlib import Path

import numpy as np
import pytest
from checkpoints import DATA

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.tree import SHIPPED_TREES, Tree, TreePath, load_tree, parse_tree
from medusa_engine.training.tree_drawing import MOST_NODES, draw, layout
from medusa_engine.training.tree_search import best_first
from medusa_engine.training.tree_sketch import percent, sketch

SVG = "{http://www.w3.org/2000/svg}"
SMALL = parse_tree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]], "small")


def halves(tree: Tree) -> dict[TreePath, float]:
    """Rank r is right half as often as rank r - 1, the first in half of the cases."""
    return {path: float(np.prod([0.5 ** (rank + 1) for rank in path])) for path in tree.paths}


def searched(nodes: int) -> Tree:
    return best_first(lambda path: 0.5 ** sum(rank + 1 for rank in path), nodes=nodes, heads=4, topk=8)


def all_trees() -> list[Tree]:
    chain = Tree(tuple((0,) * depth for depth in range(1, 40)), "chain")
    shipped = [load_tree(path) for path in sorted(SHIPPED_TREES.glob("*.json"))]
    return [*shipped, chain, Tree((), "root"), searched(200), SMALL]


def test_worked_layout() -> None:
    """Worked by hand: leaves of layer 2 a column apart, parents over the middle of their children."""
    assert layout(SMALL) == {
        (): (1.25, 0),
        (0,): (0.5, 1),
        (1,): (2.0, 1),
        (0, 0): (0.0, 2),
        (0, 1): (1.0, 2),
        (1, 0): (2.0, 2),
        (0, 0, 0): (0.0, 3),
    }


@pytest.mark.parametrize("tree", all_trees(), ids=lambda tree: tree.name)
def test_nodes_of_a_layer_stand_apart_in_the_order_of_their_paths(tree: Tree) -> None:
    places = layout(tree)
    assert set(places) == {(), *tree.paths}
    assert min(column for column, _ in places.values()) == pytest.approx(0.0)
    for depth in range(tree.depth + 1):
        layer = [places[path][0] for path in sorted(places) if len(path) == depth]
        assert all(places[path][1] == depth for path in places if len(path) == depth)
        assert all(b - a > 1 - 1e-9 for a, b in itertools.pairwise(layer))
    for path in places:
        children = [places[other][0] for other in tree.paths if other[:-1] == path]
        if children:
            assert places[path][0] == pytest.approx((min(children) + max(children)) / 2)


def nodes_of(svg: bytes) -> list[str]:
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return [element.attrib["id"] for element in root.iter() if element.attrib.get("id", "").startswith("node-")]


def texts_of(svg: bytes) -> list[str]:
    return [text.strip() for element in ElementTree.fromstring(svg).iter(f"{SVG}text") for text in element.itertext()]


@pytest.mark.parametrize("tree", [SMALL, Tree((), "root"), searched(64)], ids=lambda tree: tree.name)
def test_svg_has_one_element_per_node_with_rank_and_probability(tree: Tree) -> None:
    probabilities = halves(tree)
    svg = draw(tree, probabilities, ".svg")
    names = ["node-" + "-".join(map(str, path)) for path in tree.paths]
    assert sorted(nodes_of(svg)) == sorted(["node-root", *names])
    texts = texts_of(svg)
    for path in tree.paths:
        assert texts.count(percent(probabilities[path])) == sum(
            percent(other) == percent(probabilities[path]) for other in probabilities.values()
        )
    for rank in {path[-1] for path in tree.paths}:
        assert texts.count(str(rank)) == sum(path[-1] == rank for path in tree.paths)
    assert sum(text.startswith("head ") for text in texts) == tree.depth


def test_tree_without_probabilities_is_drawn_without_them() -> None:
    assert not any("%" in text or "E[G]" in text for text in texts_of(draw(SMALL, None, ".svg")))
    assert "%" not in sketch(SMALL, None) and "E[G]" not in sketch(SMALL, None)


def test_drawing_is_the_same_every_time() -> None:
    assert draw(SMALL, halves(SMALL), ".svg") == draw(SMALL, halves(SMALL), ".svg")


def pixels_of(png: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def test_png_is_whole_and_shows_the_nodes() -> None:
    png = draw(searched(64), halves(searched(64)), ".png")
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    pixels = pixels_of(png)
    assert pixels.shape == (height, width, 3) and zlib.crc32(png[12:29]) == struct.unpack(">I", png[29:33])[0]
    background = (pixels == 255).all(axis=2).mean()
    assert 0.3 < background < 0.95 and len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50


def test_title_of_a_slim_tree_is_whole() -> None:
    tree = load_tree(Path("smollm2_lookup_long"))
    title = pixels_of(draw(tree, halves(tree), ".png"))[:100]  # above the root
    assert (title[:, -20:] == 255).all() and (title < 255).any()


def test_probable_nodes_are_darker() -> None:
    def darkest_box(probability: float) -> int:
        tree = parse_tree([[0]], "one")
        pixels = pixels_of(draw(tree, {(0,): probability}, ".png"))
        lower = pixels[pixels.shape[0] // 2 :]  # the root above is always dark
        colours, counts = np.unique(lower.reshape(-1, 3), axis=0, return_counts=True)
        order = np.argsort(-counts)
        return int(colours[order[1]].sum())  # the most frequent is the background, the next one the box

    assert darkest_box(0.9) < darkest_box(0.3) < darkest_box(0.01)


def test_text_of_the_64_node_tree_is_large_enough_to_read() -> None:
    """Probabilities in 6.5 points at 150 dots an inch are about 10 pixels high; no two boxes touch."""
    tree = load_tree(Path("64"))
    svg = ElementTree.fromstring(draw(tree, halves(tree), ".svg"))
    columns = max(column for column, _ in layout(tree).values())
    assert float(svg.attrib["width"].removesuffix("pt")) >= 72 * 0.5 * columns


@pytest.mark.parametrize("name", ["$x_1$ & <b>", "$x^{$", "東京 😀", "n" * 300])
def test_any_name_is_drawn(name: str, recwarn: pytest.WarningsRecorder) -> None:
    tree = parse_tree({"name": name, "paths": [[0]]}, "t")
    texts = texts_of(draw(tree, None, ".svg"))
    assert any(text.startswith(name[:20]) for text in texts)
    draw(tree, None, ".png")
    assert len(recwarn) == 0


def test_tree_too_large_for_a_picture_is_refused() -> None:
    tree = Tree(tuple((rank,) for rank in range(MOST_NODES)), "wide")
    with pytest.raises(UserError, match=f"{MOST_NODES + 1} nodes"):
        draw(tree, None, ".svg")
    assert sketch(tree, None).count("\n") == MOST_NODES + 1


def test_worked_sketch() -> None:
    probabilities = {(0,): 0.5, (1,): 0.25, (0, 0): 0.25, (0, 1): 0.125, (1, 0): 0.0125, (0, 0, 0): 0.0}
    assert sketch(SMALL, probabilities).splitlines() == [
        "small: 7 nodes, 3 heads, E[G] 2.14",
        "root",
        "├── 0             50%  ████████████",
        "│   ├── 0         25%  ██████",
        "│   │   └── 0      0%",
        "│   └── 1         12%  ███",
        "└── 1             25%  ██████",
        "    └── 0        1.2%",
    ]


@pytest.mark.parametrize(
    ("probability", "text"),
    [
        (1.0, "100%"),
        (0.554, "55%"),
        (0.0996, "10%"),
        (0.05, "5.0%"),
        (0.00123, "0.1%"),
        (0.0003, "0.03%"),
        (1e-6, "<.01%"),
        (0.0, "0%"),
    ],
)
def test_percentages_are_short(probability: float, text: str) -> None:
    assert percent(probability) == text


@pytest.mark.parametrize("case", ["ok_basic_4heads", "ok_chain_depth4", "ok_flat_width5", "ok_single_node"])
def test_good_cases_are_drawn(case: str) -> None:
    tree = load_tree(DATA / "trees" / f"{case}.json")
    assert len(nodes_of(draw(tree, None, ".svg"))) == tree.nodes


def test_lookup_nodes_are_drawn_as_l() -> None:
    tree = parse_tree([[0], ["L"], ["L", "L"]], "copies")
    svg = draw(tree, None, ".svg")
    assert sorted(nodes_of(svg)) == ["node-0", "node-L", "node-L-L", "node-root"]
    assert {"head 0", "lookup 2"} <= set(texts_of(svg))
    assert sketch(tree, None).split("\n") == [
        "copies: 4 nodes, 1 head, 2 lookup nodes",
        "root",
        "├── 0",
        "└── L",
        "    └── L",
    ]
