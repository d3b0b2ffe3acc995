"""The cost ledger of a round: what its parts compute, read and hold, counted from sizes; nothing is measured.

    C = C_topk + C_backbone + C_LM + C_heads + C_path + C_posterior + C_commit, and C_lookup where the context proposes

Conventions: a multiply-add is two FLOPs, a comparison one. Of the backbone the matrix products count, all experts'
too; norms, rotations, activation functions and softmax do not, and activations are taken to stay in the processor's
caches. Attention computes all row pairs and masks some afterwards: what the tree mask hides was computed all the same.
Heads that share the LM projection save parameters, never its arithmetic.

Weights count as they are stored: int8 and int4 with their scales and zero points, embeddings and heads in the dtype.
Not counted are biases and norms, rotary frequencies, and the token map of a draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from medusa_engine.runtime.lookup import LONGEST_KEY
from medusa_engine.runtime.model_facts import ModelFacts
from medusa_engine.runtime.policy import GREEDY, REJECTION, SAMPLE, TYPICAL
from medusa_engine.runtime.tree import PLAIN_NAME, Tree

LOOKUP_PART = "lookup"
PARTS = ("top-k", "backbone", "LM", "heads", "path", "posterior", "commit", LOOKUP_PART)
ROOT = Tree((), PLAIN_NAME)

_TOKEN_BYTES = 8
# Operations per target logit: argmax; exp, sum, divide and the running sum of a draw; and p * log p with its sum.
_LOGIT_FLOPS = {GREEDY: 1, SAMPLE: 4, REJECTION: 4, TYPICAL: 6}


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
        parts: the terms, in the order of PARTS; `lookup` where the engine has it.
        tree, rows, context: the tree, its N packed rows, and the P committed rows before them.
        resident_parameters: in memory, heads included.
        temporary_kv_bytes: of the N staged cache rows, most of which are dropped.
        committed_kv_bytes: of the P committed ones.
        dense_attention_pairs: N * (P + N) row pairs, with fixed shapes N * S_max, which are computed.
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
        next_tree: the tree it proposes; `tree` if None. Where it asks for no token of the heads they do not run, and so
            for lookup.
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
    columns = facts.fixed_cache_rows or context + rows  # cache rows that the attention covers
    dense_pairs = rows * columns
    target_logits = rows * facts.vocab
    proposed = tree if next_tree is None else next_tree
    winning = head_work(facts, 1 if facts.fixed_cache_rows or proposed.heads else 0)
    # Rows that the last pass accepted, which this one gathers and writes anew: at most a path of such a tree.
    pending = 1 + (facts.depth if facts.fixed_cache_rows else tree.depth)
    runs = bool(facts.fixed_cache_rows or proposed.lookup)
    lookup = (_lookup(facts, facts.fixed_cache_rows or context, runs=runs),) if facts.lookup else ()
    return Ledger(
        parts=(
            _part(facts, "top-k", winning.logit_elements, 0, winning.logit_elements),
            _backbone(facts, rows, columns),
            _part(facts, "LM", 2 * target_logits * facts.hidden, facts.lm_weight_bytes, target_logits),
            _part(facts, "heads", winning.flops, _head_bytes(facts) if winning.flops else 0, winning.logit_elements),
            Part("path", leaves * facts.depth, 0, 2 * leaves * (facts.depth + 1) * _TOKEN_BYTES),
            _part(facts, "posterior", _LOGIT_FLOPS[policy] * target_logits, 0, target_logits),
            Part("commit", 0, 0, (2 * pending + rows) * facts.kv_row_bytes),
            *lookup,
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
    """Count a plain step: one row, and no heads but where shapes are fixed."""
    ledger = round_ledger(facts, ROOT, context=context)
    return replace(ledger, heads_on_all_rows=head_work(facts, 0))


def _part(facts: ModelFacts, name: str, flops: int, weight_bytes: int, values: int) -> Part:
    """A term that reads so many bytes of weights and reads or writes so many values."""
    return Part(name, flops, weight_bytes, round(values * facts.value_bytes))


def _backbone(facts: ModelFacts, rows: int, columns: int) -> Part:
    products = 2 * rows * facts.layer_weights
    attention = 2 * 2 * rows * columns * facts.layers * facts.attention_heads * facts.head_dim  # q * k, and p * v
    weights = facts.layer_weight_bytes + round(rows * facts.hidden * facts.weight_bytes)  # and the rows' embeddings
    return Part("backbone", products + attention, weights, columns * facts.kv_row_bytes)


def _head_bytes(facts: ModelFacts) -> int:
    """Bytes of weights the heads read: a shared projection is read once for all of them, but not for nothing."""
    blocks = facts.heads * facts.residual_blocks * facts.residual_parameters
    return round((blocks + max(1, facts.projections) * facts.projection_parameters) * facts.weight_bytes)


def _lookup(facts: ModelFacts, tokens: int, *, runs: bool) -> Part:
    """The end of the context at each of its tokens: those of the key compared, and the longest, latest match kept."""
    if not runs:
        return Part(LOOKUP_PART, 0, 0, 0)
    return Part(LOOKUP_PART, (LONGEST_KEY + 1) * tokens, 0, (tokens + 2 * facts.lookup) * _TOKEN_BYTES)
