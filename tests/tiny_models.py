"""Small checkpoints with random or rigged weights, exported by medusa-export, and transformers beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from medusa_engine.exporter.cli import main as medusa_export
from medusa_engine.exporter.head_checkpoint import load_heads
from medusa_engine.exporter.heads import HeadWeights, untrained_heads
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.tree import Tree

HEADS_FILE = "medusa_lm_head.safetensors"


@dataclass(frozen=True)
class Exported:
    """A bundle and the checkpoint it was exported from."""

    bundle: Path
    checkpoint: Path

    @cached_property
    def engine(self) -> Engine:
        return Engine.open(self.bundle, threads=1)

    @cached_property
    def model(self) -> Any:
        """The backbone in transformers, with its own eager attention; its `generate` does not stop by itself."""
        model = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float32, attn_implementation="eager")
        model.generation_config.eos_token_id = None
        return model.eval()

    @cached_property
    def heads(self) -> HeadWeights:
        config = self.model.config
        if (self.checkpoint / HEADS_FILE).is_file():
            return load_heads(self.checkpoint, hidden=config.hidden_size, vocab_size=config.vocab_size)
        return untrained_heads(self.engine.limits.heads, config.hidden_size)


RANDOM_VOCAB = 61
RANDOM_HIDDEN = 32


def random_llama(folder: Path, *, tied: bool, seed: int) -> None:
    """Save a two-layer Llama with grouped key/value heads, whose attention matters to its logits."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=RANDOM_VOCAB,
        hidden_size=RANDOM_HIDDEN,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)


def random_heads(folder: Path, *, heads: int, layers: int, own_projection: bool, scale: float, seed: int) -> None:
    """Save heads of random weights for a `random_llama`; without projections of their own they share the backbone's."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator)

    save_heads(
        folder,
        HeadWeights(
            residual_weight=normal(heads, layers, RANDOM_HIDDEN, RANDOM_HIDDEN),
            residual_bias=normal(heads, layers, RANDOM_HIDDEN),
            projection=normal(heads, RANDOM_VOCAB, RANDOM_HIDDEN) if own_projection else None,
            trained=True,
            source="",
        ),
    )


def save_heads(folder: Path, weights: HeadWeights) -> None:
    """Write heads in the layout of the original Medusa repository."""
    tensors = {}
    for head in range(weights.heads):
        for layer in range(weights.layers):
            tensors[f"{head}.{layer}.linear.weight"] = weights.residual_weight[head, layer].contiguous()
            tensors[f"{head}.{layer}.linear.bias"] = weights.residual_bias[head, layer].contiguous()
        if weights.projection is not None:
            tensors[f"{head}.{weights.layers}.weight"] = weights.projection[head].contiguous()
    save_file(tensors, folder / HEADS_FILE)


def export(checkpoint: Path, bundle: Path, *options: str, tree: Path | None = None) -> Exported:
    """Run medusa-export with a tree file, or a small default tree, and give what it wrote."""
    if tree is None:
        tree = checkpoint / "a_tree.json"
        tree.write_text(json.dumps([[0], [1], [0, 0]]))
    status = medusa_export(["--model", str(checkpoint), "--tree", str(tree), "--output", str(bundle), *options])
    assert status == 0
    return Exported(bundle, checkpoint)


def greedy_ids(model: Any, prompt_ids: Sequence[int], count: int) -> list[int]:
    """`count` tokens of `transformers.generate(do_sample=False)`."""
    if count == 0:
        return []  # transformers refuses to generate nothing
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([list(prompt_ids)]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
        )
    return out[0, len(prompt_ids) :].tolist()


@dataclass(frozen=True)
class Rigged:
    """What the rigged model and its heads say.

    Attributes:
        next_token: [V], the token that follows each token.
        correct_rank: [V, K], rank at which head j lists the right token behind each token; -1 where it does not.
    """

    next_token: npt.NDArray[np.int64]
    correct_rank: npt.NDArray[np.int64]

    def answer(self, prompt_ids: Sequence[int], count: int) -> list[int]:
        tokens, token = [], prompt_ids[-1]
        for _ in range(count):
            token = int(self.next_token[token])
            tokens.append(token)
        return tokens

    def published_per_round(self, prompt_ids: Sequence[int], tree: Tree, count: int) -> list[int]:
        """G of every round of an answer of `count` tokens that nothing but its budget ends."""
        published: list[int] = []
        frontier = prompt_ids[-1]
        paths = set(tree.paths)
        while sum(published) < count:
            ranks = tuple(self.correct_rank[frontier].tolist())
            accepted = max(a for a in range(len(ranks) + 1) if a == 0 or (ranks[:a] in paths and min(ranks[:a]) >= 0))
            published.append(min(accepted + 1, count - sum(published)))
            frontier = self.answer([frontier], accepted + 1)[-1]
        return published


RIGGED_HEADS = 4
RIGGED_VOCAB = 48
RIGGED_RANKS = 2  # a head lists the right token at one of the first two ranks


def rigged_model() -> Rigged:
    """A cycle through the vocabulary; behind every token a random number of heads is right."""
    generator = np.random.default_rng(5)
    order = generator.permutation(RIGGED_VOCAB)
    next_token = np.empty(RIGGED_VOCAB, dtype=np.int64)
    next_token[order] = np.roll(order, -1)
    correct_rank = generator.integers(0, RIGGED_RANKS, (RIGGED_VOCAB, RIGGED_HEADS))
    right_heads = generator.integers(0, RIGGED_HEADS + 1, RIGGED_VOCAB)
    for token, right in enumerate(right_heads):
        correct_rank[token, right : right + 1] = -1  # the heads behind a wrong one may be right again
    return Rigged(next_token, correct_rank)


def save_rigged(folder: Path, rigged: Rigged, *, eos_token_id: list[int] | None = None) -> None:
    """Save the rigged model as a Llama with Medusa heads.

    Embeddings are one-hot, and attention and MLP change the residual stream by a thousandth: the hidden state tells
    the last token, so that a projection is a table by token. The keys and values still depend on the whole context.
    """
    hidden = 64
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=RIGGED_VOCAB,
        hidden_size=hidden,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(RIGGED_VOCAB, hidden))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(1e-3)
            layer.mlp.down_proj.weight.mul_(1e-3)
        model.lm_head.weight.copy_(_ranking(rigged.next_token, np.zeros(RIGGED_VOCAB, dtype=np.int64), hidden, seed=0))
    model.save_pretrained(folder)

    right = rigged.next_token
    projections = []
    for head in range(RIGGED_HEADS):
        right = rigged.next_token[right]  # head j: the token j + 2 behind the one that is read
        projections.append(_ranking(right, rigged.correct_rank[:, head], hidden, seed=head + 1))
    save_heads(
        folder,
        HeadWeights(
            residual_weight=1e-3 * torch.randn(RIGGED_HEADS, 1, hidden, hidden),
            residual_bias=1e-3 * torch.randn(RIGGED_HEADS, 1, hidden),
            projection=torch.stack(projections),
            trained=True,
            source="",
        ),
    )


def _ranking(right: npt.NDArray[np.int64], rank: npt.NDArray[np.int64], hidden: int, *, seed: int) -> torch.Tensor:
    """[V, hidden] projection that ranks `right[token]` at `rank[token]` (-1: last) behind the one-hot `token`."""
    generator = np.random.default_rng(seed)
    weight = torch.zeros(RIGGED_VOCAB, hidden)
    scores = torch.linspace(1.0, 0.1, RIGGED_VOCAB)  # of the tokens from the best to the worst
    scores[: RIGGED_RANKS + 1] = torch.arange(RIGGED_RANKS + 2, 1, -1)  # far apart where the order matters
    for token in range(RIGGED_VOCAB):
        ranked = [int(other) for other in generator.permutation(RIGGED_VOCAB) if other != right[token]]
        ranked.insert(len(ranked) if rank[token] < 0 else int(rank[token]), int(right[token]))
        weight[ranked, token] = scores
    return weight
