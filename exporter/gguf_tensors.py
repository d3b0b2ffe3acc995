"""The tensors of a GGUF file that transformers passes over when it loads one."""

from __future__ import annotations

import re
from typing import Any

from medusa_engine.exporter.gguf_fields import FOLDER_HINT, GGUFFields
from medusa_engine.exporter.gguf_rope import FACTORS
from medusa_engine.runtime.errors import UserError

_ROPE = re.compile(re.escape(FACTORS) + r"|blk\.\d+\.attn_rot_embd\.weight")  # read apart, and what the base tells


def check_used(model: Any, fields: GGUFFields) -> None:
    """Refuse a file of which a loaded model does not use a tensor.

    Raises:
        UserError: names the first.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(fields.architecture, TensorProcessor)(config=model.config.to_dict())
    used = get_gguf_hf_weights_map(model, processor)
    left = [
        name
        for name in fields.tensors
        if name not in used and name.removesuffix(".weight") not in used and not _ROPE.fullmatch(name)
    ]
    if left:
        raise UserError(
            f"{fields.path}: tensors are left over ({len(left)}), which {type(model).__name__} does not have;"
            f" the first is {left[0]}",
            FOLDER_HINT,
        )
