"""The demo model as transformers loads it, and the prompts it is asked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUNDLE = ROOT / "engines" / "smollm2-135m"
GGUF = ROOT / "engines" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS_FILE = ROOT / "tests" / "data" / "demo_prompts.json"
GREEDY_FILE = ROOT / "tests" / "data" / "demo_greedy.json"
ANSWER_TOKENS = 128


@dataclass(frozen=True)
class Prompt:
    """A prompt; `chat` ones go through the chat template."""

    name: str
    chat: bool
    text: str

    @property
    def conversation(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]


def prompts() -> list[Prompt]:
    """The prompts, of many kinds, in the order of their file."""
    return [Prompt(**entry) for entry in json.loads(PROMPTS_FILE.read_text(encoding="utf-8"))]


def load_model() -> Any:
    """The demo model in fp32 with transformers' eager attention, which does not stop by itself."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(GGUF.parent), gguf_file=GGUF.name, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()
