"""The text decoder inside a model that reads images too: its config, and its weights among those of the whole model.

Only of kinds whose wrapper adds nothing to text without images. Others scale what the decoder reads or says, mask the
prompt in both directions, or count positions in three dimensions: their decoder alone would answer otherwise.
"""

from __future__ import annotations

import re
from typing import Any

KINDS = ("gemma3", "idefics3", "internvl", "llava", "llava_next", "mistral3", "smolvlm")

# transformers' `key_mapping`: names of the whole model's tensors, as saved lately and before -> the decoder's own.
NAMES = {
    r"^model\.(language_model|text_model)\.": "model.",
    r"^(language_model|text_model)\.model\.": "model.",
    r"^(language_model|text_model)\.lm_head\.": "lm_head.",
}


def text_decoder(config: Any) -> Any | None:
    """The config of the decoder alone; None for models of other kinds."""
    if config.model_type not in KINDS:
        return None
    decoder = config.get_text_config()
    decoder.tie_word_embeddings = config.tie_word_embeddings
    return decoder


def decoder_name(name: str) -> str:
    """What the decoder alone calls a tensor of the whole model."""
    for pattern, replacement in NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name
