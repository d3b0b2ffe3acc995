"""Write tests/data/demo_greedy.json: what `transformers.generate(do_sample=False)` answers to the demo prompts.

    .venv/bin/python tests/make_demo_greedy.py

The tests compare the engine with this file, and the file with transformers.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

import torch
from demo_model import ANSWER_TOKENS, GGUF, GREEDY_FILE, load_model, prompts
from transformers import AutoTokenizer

from medusa_engine.runtime.manifest import file_sha256


def main() -> None:
    model = load_model()
    tokenizer = AutoTokenizer.from_pretrained(str(GGUF.parent), gguf_file=GGUF.name)
    answers = {}
    for prompt in prompts():
        if prompt.chat:
            ids = tokenizer.apply_chat_template(prompt.conversation, add_generation_prompt=True)["input_ids"]
        else:
            ids = tokenizer(prompt.text)["input_ids"]
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=ANSWER_TOKENS,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.cat(out.logits).topk(2, dim=-1).values  # [ANSWER_TOKENS, 2]
        answers[prompt.name] = {
            "prompt_ids": ids,
            "token_ids": out.sequences[0, len(ids) :].tolist(),
            "smallest_margin": round(float((best[:, 0] - best[:, 1]).min()), 6),
        }
        print(prompt.name, answers[prompt.name]["smallest_margin"], file=sys.stderr)
    document = {
        "made_by": "transformers.generate(do_sample=False), fp32, eager attention, no stop token",
        "versions": {name: version(name) for name in ("transformers", "torch", "gguf")},
        "model": {GGUF.name: file_sha256(GGUF)},
        "smallest_margin": "between the two best logits, over the tokens of the answer",
        "answers": answers,
    }
    lines = json.dumps(document, indent=1, ensure_ascii=False)
    GREEDY_FILE.write_text(_numbers_on_one_line(lines) + "\n", encoding="utf-8")


def _numbers_on_one_line(text: str) -> str:
    """JSON with every list of numbers on one line."""
    pieces = text.split("[")
    for index, piece in enumerate(pieces[1:], start=1):
        inside, end, rest = piece.partition("]")
        pieces[index] = " ".join(inside.split()) + end + rest
    return "[".join(pieces)


if __name__ == "__main__":
    main()
