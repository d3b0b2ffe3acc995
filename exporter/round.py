"""One speculative round as a torch module: what is traced, and what the tests run beside the engine.

verify the tree (or a prompt chunk) -> accept -> heads on the winning row only -> tokens of the next tree.
The graphs of a bundle are selections of this module's outputs, see `graphs.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from medusa_engine.exporter.acceptance import AcceptedPath, paths_of
from medusa_engine.exporter.attention import Mask, additive_mask
from medusa_engine.exporter.cache import StaticCache, in_place_of_nan
from medusa_engine.exporter.heads import MedusaHeads
from medusa_engine.exporter.lookup import context_of, look_up
from medusa_engine.exporter.penalty import PenaltyInputs, penalise
from medusa_engine.exporter.policies import TypicalInputs, judge
from medusa_engine.exporter.rejection import RejectionInputs, draw_drafts
from medusa_engine.exporter.round_shape import RoundShape
from medusa_engine.exporter.sampling import SamplingInputs
from medusa_engine.exporter.stopping import StopInputs, publish
from medusa_engine.exporter.window import sliding_window, window_masks
from medusa_engine.runtime.manifest import graph_name
from medusa_engine.runtime.policy import REJECTION, graph_variant


class RowProjection(torch.nn.Module):
    """The LM projection on rows: one matrix product over [R, H], and the rows kept for the heads.

    Args:
        linear: the model's own projection; its weight is used where it lies (tied embeddings are not copied).
    """

    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.rows = torch.empty(0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows = hidden.reshape(-1, hidden.shape[-1])  # [R, H]
        return self.linear(self.rows).reshape(*hidden.shape[:-1], -1)


class Round(torch.nn.Module):
    """Backbone, acceptance, heads and next tree over a static cache.

    Args:
        model: a transformers causal LM loaded with `attn_implementation=ATTENTION_NAME`.
        heads: its Medusa heads.
        shape: fixed sizes.
        policies: of acceptance, beside greedy.
        repetition_penalty: also compute each policy behind the repetition penalty.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        heads: MedusaHeads,
        shape: RoundShape,
        policies: Collection[str] = (),
        *,
        repetition_penalty: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.window = sliding_window(model)
        self.projection = RowProjection(model.get_output_embeddings())
        model.set_output_embeddings(self.projection)
        self.heads = heads
        self.shape = shape
        self.policies = policies
        # Depth of a candidate slot: 0 for the root, j + 1 for the slots of head j, d for the lookup of depth d.
        depths = [0, *(1 + head for head in range(shape.heads) for _ in range(shape.topk)), *range(1, 1 + shape.lookup)]
        self.register_buffer("slot_depths", torch.tensor(depths), persistent=False)
        self.repetition_penalty = repetition_penalty

    def forward(
        self,
        input_ids: torch.Tensor,  # [1, N]
        position_ids: torch.Tensor,  # [1, N]
        tree_mask: torch.Tensor,  # [N, N] bool
        logit_rows: torch.Tensor,  # [R]
        retrieve_indices: torch.Tensor,  # [paths, D+1]
        tree_indices: torch.Tensor,  # [N']
        past_length: torch.Tensor,  # [1]
        pending_rows: torch.Tensor,  # [D+1]
        pending_count: torch.Tensor,  # [1]
        stop_ids: torch.Tensor,  # [S]
        token_budget: torch.Tensor,  # [1]
        finished: torch.Tensor,  # [1] bool
        live: torch.Tensor,  # [L]: 0 ... P+G+N-1; carries the number of live rows as a shape; not with fixed shapes
        uniforms: torch.Tensor,  # [R] fp32; with fixed shapes [S_max], by position
        temperature: torch.Tensor,  # [1] fp32
        top_k: torch.Tensor,  # [1]
        top_p: torch.Tensor,  # [1] fp32
        min_p: torch.Tensor,  # [1] fp32
        ranks: torch.Tensor,  # [C]: carries the number of logits to sort as a shape; not with fixed shapes
        posterior_threshold: torch.Tensor,  # [1] fp32
        posterior_alpha: torch.Tensor,  # [1] fp32
        root_drawn: torch.Tensor,  # [1] bool
        proposal: torch.Tensor,  # [K, V] fp32
        accept_uniforms: torch.Tensor,  # [R] fp32, traced as a size of its own
        draft_uniforms: torch.Tensor,  # [2K] fp32
        history: torch.Tensor,  # [T]: tokens before the root of this pass; with fixed shapes [S_max], by position
        repetition_penalty: torch.Tensor,  # [1] fp32
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Outputs of every graph, under `NAME.output` with the name of the graph; logits and cache under their own."""
        staged = past_length + pending_count  # [1]: cache row of packed row 0
        rows = input_ids.shape[1]
        fixed = self.shape.fixed
        columns = torch.arange(self.shape.cache_rows) if fixed else live  # cache rows that the attention covers
        nan = in_place_of_nan(rows, logit_rows[:1], keys[0].dtype)
        live_rows = None if fixed else live.shape[0]
        keeping_nan = range(self.shape.layers) if fixed else [self.shape.layers - 1]
        cache = StaticCache(keys, values, past_length, pending_rows, pending_count, live_rows, nan, keeping_nan)
        logits, hidden = self.backbone(input_ids, position_ids, tree_mask, logit_rows, columns, staged, cache)

        logit_index = torch.zeros(rows, dtype=torch.int64)  # packed row -> its place in logit_rows
        logit_index = logit_index.scatter(0, logit_rows, torch.arange(logit_rows.shape[0]))
        paths = paths_of(input_ids[0], retrieve_indices)
        if fixed:
            uniforms = uniforms.index_select(0, position_ids[0].index_select(0, logit_rows))  # [R]
        sampling = SamplingInputs(uniforms, temperature, top_k, top_p, min_p, None if fixed else ranks)
        stop = StopInputs(stop_ids, token_budget, finished)
        typical = TypicalInputs(posterior_threshold, posterior_alpha, root_drawn)
        rejection = RejectionInputs(proposal, accept_uniforms, draft_uniforms)
        scores = {False: logits}  # whether repetition is penalised -> [R, V]
        if self.repetition_penalty:
            on_path = tree_mask.index_select(0, logit_rows)  # [R, N]
            scores[True] = penalise(logits, input_ids[0], on_path, PenaltyInputs(history, repetition_penalty))
        policies, chosen, accepted, next_root = {}, {}, {}, {}  # of each variant; the others see `policies.Verdict`
        for penalised, by_row in scores.items():
            verdicts = judge(self.policies, by_row, paths, logit_index, sampling, typical, rejection, stop)
            for name, verdict in verdicts.items():
                variant = graph_variant(name, penalised=penalised)
                policies[variant] = name
                accepted[variant], next_root[variant] = verdict.published, verdict.next_root
                if verdict.tokens is not None:
                    chosen[variant] = verdict.tokens

        out = {"logits": logits}
        blocks = self.heads.blocks() if self.shape.heads else None
        for variant, acceptance in accepted.items():
            winning_row, path_rows, count = (
                acceptance.pop("winning_row"),
                acceptance.pop("path_rows"),
                acceptance["accepted_count"],
            )
            root_position = position_ids[0].index_select(0, path_rows[:1])  # [1]
            frontier = hidden.index_select(0, logit_index.index_select(0, winning_row))  # [1, H]
            if policies[variant] == REJECTION:
                head_logits = self.heads.full_logits(frontier, self.shape.vocab_size, blocks)
                tokens, acceptance["next_proposal"] = draw_drafts(head_logits, sampling, draft_uniforms, count)
                ranked = tokens[:, None].expand(-1, self.shape.topk)  # a chain has rank 0 alone
            elif self.shape.heads:
                ranked = self.heads.rank(frontier, self.shape.topk, blocks)  # [K, TOPK]
            candidates = [next_root[variant]]  # by slot
            if self.shape.heads:
                candidates.append(ranked.reshape(-1))  # [K*TOPK]
            if self.shape.lookup:
                if fixed:  # it keeps the history itself: rows of a tree write where other tokens are to come
                    known = history.scatter(0, position_ids[0], input_ids[0])
                else:
                    known = torch.cat([history, torch.zeros(self.shape.depth + 2, dtype=torch.int64)])
                context = context_of(known, root_position, acceptance["accepted_tokens"], count, next_root[variant])
                if fixed:
                    acceptance["next_history"] = context
                candidates.append(look_up(context, root_position + count, self.shape.lookup))
            outputs = acceptance | {
                "next_finished": acceptance["next_finished"] | (next_root[variant] < 0),
                "next_input_ids": torch.cat(candidates).index_select(0, tree_indices)[None],
                "next_position_ids": (root_position + count + self.slot_depths.index_select(0, tree_indices))[None],
                # Rows before the root of this pass (a prompt chunk has them) are committed, the path's are pending.
                "next_past_length": root_position,
                "next_pending_rows": (path_rows - path_rows[:1]).clamp(min=0),
                "next_pending_count": count,
            }
            out |= {f"{graph_name('round', variant)}.{name}": value for name, value in outputs.items()}

        last_row = logit_rows[-1:]  # [1]
        root_position = position_ids[0].index_select(0, last_row)
        pad = torch.full((self.shape.depth,), -1, dtype=torch.int64)
        root = torch.cat([input_ids[0].index_select(0, last_row), pad])  # [D+1]
        step = publish(AcceptedPath(torch.zeros_like(pending_rows), root, torch.ones(1, dtype=torch.int64)), stop)
        for variant, tokens in chosen.items():
            outputs = {
                "accepted_tokens": step["accepted_tokens"],
                "accepted_count": step["accepted_count"],
                "next_token_budget": step["next_token_budget"],
                "next_finished": step["next_finished"] | (tokens[-1:] < 0),
                "next_input_ids": tokens[-1:][None],
                "next_position_ids": (root_position + step["accepted_count"])[None],
                "next_past_length": root_position,
                "next_pending_rows": step["path_rows"],
                "next_pending_count": step["accepted_count"],
            }
            out |= {f"{graph_name('step', variant)}.{name}": value for name, value in outputs.items()}
        for layer in range(self.shape.layers):
            out[f"present_key.{layer}"] = cache.keys[layer]
            out[f"present_value.{layer}"] = cache.values[layer]
        return out

    def backbone(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        tree_mask: torch.Tensor,
        logit_rows: torch.Tensor,
        live: torch.Tensor,
        staged: torch.Tensor,
        cache: StaticCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Target logits [R, V] in fp32, and the hidden rows [R, H] they were projected from."""
        mask = self.attention_mask(position_ids, tree_mask, live, staged)
        if self.shape.fixed:  # passes that were launched behind one whose logits decided no root: -1 reaches no gather
            input_ids = input_ids.clamp(min=0)
        out = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=additive_mask(mask, self.shape.dtype) if self.shape.fixed else mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=logit_rows,
        )
        return out.logits.squeeze(0).float(), self.projection.rows

    def attention_mask(
        self, position_ids: torch.Tensor, tree_mask: torch.Tensor, live: torch.Tensor, staged: torch.Tensor
    ) -> Mask:
        """[1, 1, N, L] bool: every committed row, and of this pass's rows the ancestors-or-self.

        A sliding window counts positions, not cache rows: siblings share one position.
        """
        rows = tree_mask.shape[0]
        packed = live - staged  # [L] < 0: committed; else the packed row of this pass
        inside = (packed >= 0) & (packed < rows)
        column = packed.clamp(0, rows - 1)
        full = (inside[None] & tree_mask.index_select(1, column)) | (packed < 0)[None]
        if self.window is None:
            return full[None, None]
        position = torch.where(inside, position_ids[0].index_select(0, column), live)
        local = full & ((position_ids[0][:, None] - position[None]) < self.window)
        return window_masks(self.model.config.get_text_config(), full[None, None], local[None, None])
