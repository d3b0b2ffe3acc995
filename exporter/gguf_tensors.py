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
    left = [name for name in fields.tensors if not _ROPE.fullmatch(name)]
    for part in (_Whole(model), model):  # its parts apart are slow to ask, and seldom know more
        used = _used(part, fields.architecture) if left else set()
        left = [name for name in left if name not in used and name.removesuffix(".weight") not in used]
    if left:
        raise UserError(
            f"{fields.path}: tensors are left over ({len(left)}), which {type(model).__name__} does not have;"
            f" the first is {left[0]}",
            FOLDER_HINT,
        )


class _Whole:
    """A model as if it had no parts."""

    def __init__(self, model: Any) -> None:
        self.config, self.state_dict = model.config, model.state_dict

    def named_children(self) -> tuple[()]:
        return ()


def _used(model: Any, architecture: str) -> set[str]:
    """GGUF's names of a model's tensors."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    return set(get_gguf_hf_weights_map(model, processor))
