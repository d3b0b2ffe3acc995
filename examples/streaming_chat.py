"""A conversation, an answer for every line of input: `python examples/streaming_chat.py [ENGINE [TOKENS]]`.

The session keeps the keys and values of earlier turns, so that each turn runs only what is new.
"""

import argparse
import sys

from medusa_engine.runtime.answer_options import Message
from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError


def main(engine: Engine, max_new_tokens: int) -> None:
    messages: list[Message] = []
    with engine.session() as session:
        for line in sys.stdin:
            messages.append({"role": "user", "content": line.rstrip("\n")})
            stream = session.stream(messages, max_new_tokens=max_new_tokens)
            for piece in stream:
                print(piece.text, end="", flush=True)
            print()
            answer = stream.generation
            print(f"[{answer.cached_tokens} of {answer.prompt_tokens} prompt tokens were kept]", file=sys.stderr)
            messages.append({"role": "assistant", "content": answer.text or ""})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", nargs="?", default="engines/smollm2-135m")
    parser.add_argument("tokens", nargs="?", type=int, default=128)
    options = parser.parse_args()
    try:
        main(Engine.open(options.engine), options.tokens)
    except UserError as error:  # for instance, a conversation that has outgrown the cache
        sys.exit(str(error))
