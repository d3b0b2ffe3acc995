"""Every row of the batch sees its own conversation, as transformers' own attention does for each kind of model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from medusa_engine.training.batch_engine import BatchEngine

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
MODELS = {
    "grouped heads": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "sliding window": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=6)),
    "soft caps, local and global layers": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=8)
    ),
}
LENGTHS = (20, 13, 17)  # of the three rows; the second starts a conversation anew when it is at its end


def model(kind: str) -> Any:
    torch.manual_seed(0)
    made = MODELS[kind]().eval()
    made.set_attn_implementation("eager")
    return made


@pytest.mark.parametrize("kind", MODELS)
def test_rows_at_their_own_positions_equal_transformers(kind: str) -> None:
    random = np.random.default_rng(1)
    first = [random.integers(0, 96, size=length) for length in LENGTHS]
    second = random.integers(0, 96, size=max(LENGTHS) - LENGTHS[1])
    engine = BatchEngine(model(kind), batch=3, max_length=max(LENGTHS))
    reference = model(kind)

    def expected(tokens: Any) -> tuple[Any, Any]:
        with torch.no_grad():
            out = reference(input_ids=torch.from_numpy(tokens)[None], output_hidden_states=True, use_cache=False)
        return out.logits[0].log_softmax(dim=-1).numpy(), out.hidden_states[-1][0].numpy()

    wanted = [expected(tokens) for tokens in first]
    restarted = expected(second)
    for index in range(max(LENGTHS)):
        # A row that has nothing to do is fed its last token again, as rows without a conversation are fed something.
        at = [min(index, length - 1) for length in LENGTHS]
        rows = [(tokens[place], place, *known) for tokens, place, known in zip(first, at, wanted, strict=True)]
        if index >= LENGTHS[1]:
            place = index - LENGTHS[1]
            rows[1] = (second[place], place, *restarted)
        tokens, positions = (np.array([row[field] for row in rows]) for field in (0, 1))
        result = engine.step(tokens, positions)
        for row, (_, place, logprobs, hidden) in enumerate(rows):
            assert result.hidden[row].astype(np.float32) == pytest.approx(hidden[place], abs=2e-2, rel=2e-3)  # fp16
            assert result.top_logprobs[row] == pytest.approx(logprobs[place][result.top_ids[row]], abs=1e-3)
            assert result.top_ids[row, 0] == logprobs[place].argmax()


def test_bfloat16_gives_nearly_the_same_distribution() -> None:
    tokens = np.random.default_rng(2).integers(0, 96, size=(12, 3))
    engines = [BatchEngine(model("grouped heads"), batch=3, max_length=12, dtype=t) for t in ("float32", "bfloat16")]
    for position, row in enumerate(tokens):
        exact, rounded = (engine.step(row, np.full(3, position)) for engine in engines)
        for index in range(3):
            known = dict(zip(exact.top_ids[index].tolist(), exact.top_logprobs[index].tolist(), strict=True))
            first = rounded.top_ids[index, 0].item()
            assert known[first] == pytest.approx(rounded.top_logprobs[index, 0], abs=0.3)
