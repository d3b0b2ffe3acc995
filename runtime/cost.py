"""The cost ledger of a round: what its parts compute, read and hold, counted from sizes; nothing is measured.

    C = C_topk + C_backbone + C_LM + C_heads + C_path + C_posterior + C_commit

Conventions: a multiply-add is two FLOPs, a comparison one. Of the backbone the matrix products count, all experts'
too; norms, rotations, activation functions and softmax do not, and activations are taken to stay in the processor's
caches. Attention computes all row pairs and masks some afterwards: what the tree mask hides was computed all the same.
Heads that share the LM projection save parameters, never its arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.manifest import Manifest
from medusa_engine.runtime.policy import GREEDY, REJECTION, SAMPLE, TYPICAL
from medusa_engine.runtime.tree import PLAIN_NAME, Tree

PARTS = ("top-k", "backbone", "LM", "heads", "path", "posterior", "commit")
ROOT = Tree((), PLAIN_NAME)

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
_TOKEN_BYTES = 8
# Operations per target logit: argmax; exp, sum, divide and the running sum of a draw; and p * log p with its sum.
_LOGIT_FLOPS = {GREEDY: 1, SAMPLE: 4, REJECTION: 4, TYPICAL: 6}


@dataclass(frozen=True)
class ModelFacts:
    """The sizes that costs depend on.

    Attributes:
        hidden, vocab: H and V.
        layers, attention_heads, kv_heads, head_dim: of the decoder.
        layer_weights: elements of all weight matrices in the layers: each row of a pass multiplies them once.
        parameters: of the backbone, embeddings and LM projection included, tied ones once.
        heads, residual_blocks: K heads of so many blocks.
        choices: V', tokens that a head chooses from.
        projections: of the heads' own: 0 where they share the LM projection, 1 where they share another one, K.
        weight_bytes, value_bytes: of one number of the weights; of cache and logits.
    """

    hidden: int
    vocab: int
    layers: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    layer_weights: int
    parameters: int
    heads: int
    residual_blocks: int
    choices: int
    projections: int
    weight_bytes: float
    value_bytes: float

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of one row of the key/value cache, all layers."""
        return round(2 * self.layers * self.kv_heads * self.head_dim * self.value_bytes)

    @property
    def residual_parameters(self) -> int:
        """Parameters of one residual block: weight [H, H] and bias [H]."""
        return self.hidden * self.hidden + self.hidden

    @property
    def projection_parameters(self) -> int:
        """Parameters of one head projection, [V', H]."""
        return self.choices * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters that the heads add to the backbone's."""
        blocks = self.heads * self.residual_blocks * self.residual_parameters
        return blocks + self.projections * self.projection_parameters

    @property
    def resident_parameters(self) -> int:
        """Parameters in memory while rounds run."""
        return self.parameters + self.head_parameters


def facts_of(manifest: Manifest) -> ModelFacts:
    """The sizes of a bundle.

    Raises:
        UserError: it was exported before the manifest told them.
    """

    def fact(section: str, name: str) -> int:
        value: Any = getattr(manifest, section).get(name)
        if type(value) is not int or value < 0:
            raise UserError(
                f'{manifest.name}: the bundle\'s manifest does not tell "{section}.{name}", which costs depend on',
                "export the model again with this version of medusa-export",
            )
        return value

    limits = manifest.limits
    scalar = _BYTES.get(manifest.dtype)
    if scalar is None:
        raise UserError(
            f"{manifest.name}: weights of dtype {manifest.dtype} have no known size", f"known are {', '.join(_BYTES)}"
        )
    return ModelFacts(
        hidden=fact("model", "hidden_size"),
        vocab=limits.vocab_size,
        layers=limits.layers,
        attention_heads=fact("model", "attention_heads"),
        kv_heads=limits.kv_heads,
        head_dim=limits.head_dim,
        layer_weights=fact("model", "layer_weights"),
        parameters=fact("model", "parameters"),
        heads=limits.heads,
        residual_blocks=fact("heads", "residual_layers"),
        choices=manifest.heads.get("draft_vocabulary") or limits.vocab_size,
        projections=fact("heads", "projections"),
        weight_bytes=scalar,
        value_bytes=scalar,
    )


@dataclass(frozen=True)
class HeadWork:
    """What the K heads compute on a number of rows.

    Attributes:
        residual_flops: of the residual blocks' products.
        projection_flops: of the projections, which sharing one does not save.
        logit_elements: rows x K x V'.
    """

    residual_flops: int
    projection_flops: int
    logit_elements: int

    @property
    def flops(self) -> int:
        return self.residual_flops + self.projection_flops


def head_work(facts: ModelFacts, rows: int) -> HeadWork:
    """The heads on `rows` rows: 1 is the winning row, N what the original implementation does."""
    on_rows = rows * facts.heads
    return HeadWork(
        residual_flops=2 * on_rows * facts.residual_blocks * facts.hidden * facts.hidden,
        projection_flops=2 * on_rows * facts.hidden * facts.choices,
        logit_elements=on_rows * facts.choices,
    )


@dataclass(frozen=True)
class Part:
    """One term of the ledger.

    Attributes:
        name: one of PARTS.
        flops: arithmetic, comparisons included.
        weight_bytes: of weights that are read.
        value_bytes: of cache rows, logits and tokens that are read or written.
    """

    name: str
    flops: int
    weight_bytes: int
    value_bytes: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.value_bytes


@dataclass(frozen=True)
class Ledger:
    """What a round is counted to cost.

    Attributes:
        parts: the seven terms, in the order of PARTS.
        tree, rows, context: the tree, its N packed rows, and the P committed rows before them.
        resident_parameters: in memory, heads included.
        temporary_kv_bytes: of the N staged cache rows, most of which are dropped.
        committed_kv_bytes: of the P committed ones.
        dense_attention_pairs: N * (P + N) row pairs, which are computed.
        allowed_attention_pairs: those that the tree mask lets through; told, never counted as work.
        target_logit_elements: N * V.
        gathered_path_logit_elements: paths * (depth + 1) * V, which acceptance path by path would gather.
        heads_on_winning_row, heads_on_all_rows: the first is done; the second is what it saves.
    """

    parts: tuple[Part, ...]
    tree: str
    rows: int
    context: int
    resident_parameters: int
    temporary_kv_bytes: int
    committed_kv_bytes: int
    dense_attention_pairs: int
    allowed_attention_pairs: int
    target_logit_elements: int
    gathered_path_logit_elements: int
    heads_on_winning_row: HeadWork
    heads_on_all_rows: HeadWork

    @property
    def flops(self) -> int:
        return sum(part.flops for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def part(self, name: str) -> Part:
        """The term of that name.

        Raises:
            KeyError: there is none.
        """
        return {part.name: part for part in self.parts}[name]


def round_ledger(
    facts: ModelFacts, tree: Tree, *, context: int, next_tree: Tree | None = None, policy: str = GREEDY
) -> Ledger:
    """Count a round that verifies `tree` behind `context` committed rows.

    Args:
        next_tree: the tree it proposes; `tree` if None. Where that is the root alone, the heads do not run.
        policy: of acceptance.

    Raises:
        ValueError: a negative context.
    """
    if context < 0:
        raise ValueError(f"a cache of {context} rows")
    rows = tree.nodes
    parents = {path[:-1] for path in tree.paths}
    leaves = sum(path not in parents for path in ((), *tree.paths))
    mask_ones = rows + sum(len(path) for path in tree.paths)  # each row sees itself and its ancestors
    dense_pairs = rows * (context + rows)
    target_logits = rows * facts.vocab
    winning = head_work(facts, 1 if (next_tree or tree).nodes > 1 else 0)
    return Ledger(
        parts=(
            _part(facts, "top-k", winning.logit_elements, 0, winning.logit_elements),
            _backbone(facts, rows, context, dense_pairs),
            _part(facts, "LM", 2 * target_logits * facts.hidden, facts.vocab * facts.hidden, target_logits),
            _part(facts, "heads", winning.flops, _head_weights(facts) if winning.flops else 0, winning.logit_elements),
            Part("path", leaves * facts.heads, 0, 2 * leaves * (facts.heads + 1) * _TOKEN_BYTES),
            _part(facts, "posterior", _LOGIT_FLOPS[policy] * target_logits, 0, target_logits),
            # Compaction reads and writes up to D+1 rows, with fixed shapes always as many, and the N new ones.
            Part("commit", 0, 0, (2 * (facts.heads + 1) + rows) * facts.kv_row_bytes),
        ),
        tree=tree.name,
        rows=rows,
        context=context,
        resident_parameters=facts.resident_parameters,
        temporary_kv_bytes=rows * facts.kv_row_bytes,
        committed_kv_bytes=context * facts.kv_row_bytes,
        dense_attention_pairs=dense_pairs,
        allowed_attention_pairs=rows * context + mask_ones,
        target_logit_elements=target_logits,
        gathered_path_logit_elements=leaves * (tree.depth + 1) * facts.vocab,
        heads_on_winning_row=winning,
        heads_on_all_rows=head_work(facts, rows),
    )


def step_ledger(facts: ModelFacts, *, context: int) -> Ledger:
    """Count a plain step: one row, no heads."""
    ledger = round_ledger(facts, ROOT, context=context)
    return replace(ledger, heads_on_all_rows=head_work(facts, 0))


def _part(facts: ModelFacts, name: str, flops: int, weights: int, values: int) -> Part:
    """A term that reads so many weights and reads or writes so many values."""
    return Part(name, flops, round(weights * facts.weight_bytes), round(values * facts.value_bytes))


def _backbone(facts: ModelFacts, rows: int, context: int, dense_pairs: int) -> Part:
    products = 2 * rows * facts.layer_weights
    attention = 2 * 2 * dense_pairs * facts.layers * facts.attention_heads * facts.head_dim  # q * k, and p * v
    weights = facts.layer_weights + rows * facts.hidden  # and the rows' embeddings
    read = (context + rows) * facts.kv_row_bytes
    return Part("backbone", products + attention, round(weights * facts.weight_bytes), read)


def _head_weights(facts: ModelFacts) -> int:
    """Weights the heads read: a shared projection is read once for all of them, but not for nothing."""
    blocks = facts.heads * facts.residual_blocks * facts.residual_parameters
    return blocks + max(1, facts.projections) * facts.projection_parameters
