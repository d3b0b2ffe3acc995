"""What the cost ledger needs to know of a backbone, for the manifest."""

from __future__ import annotations

from typing import Any

from medusa_engine.exporter.passes.quantize import Stored
from medusa_engine.runtime.manifest import DTYPE_BYTES


def cost_facts(model: Any) -> dict[str, int | None]:
    """Sizes of a transformers causal LM, see `runtime/cost.py`.

    Returns:
        `attention_heads`; `intermediate_size`, None where the config does not tell; `layer_weights`, elements of the
        matrices that each row multiplies, embeddings and LM projection apart; `parameters`, all, tied ones once.
    """
    config = model.config.get_text_config()
    projection = model.get_output_embeddings()
    projection = getattr(projection, "linear", projection)  # while it is traced, a `RowProjection` wraps it
    tables = {id(model.get_input_embeddings().weight), id(projection.weight)}
    parameters = list(model.parameters())
    return {
        "attention_heads": config.num_attention_heads,
        "intermediate_size": getattr(config, "intermediate_size", None),
        "layer_weights": sum(p.numel() for p in parameters if p.ndim >= 2 and id(p) not in tables),
        "parameters": sum(p.numel() for p in parameters),
    }


def stored_facts(stored: Stored, layer_weights: int) -> dict[str, int]:
    """Bytes of what a round reads of a quantised backbone: `layer_weight_bytes`, `lm_weight_bytes`.

    Matrices that were not quantised, as those of experts are not, are in fp32.
    """
    unquantised = layer_weights - stored.layer_elements
    return {
        "layer_weight_bytes": stored.layer_bytes + unquantised * DTYPE_BYTES["float32"],
        "lm_weight_bytes": stored.lm_bytes,
    }
