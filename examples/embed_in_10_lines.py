"""An answer in a program of your own: `python examples/embed_in_10_lines.py [ENGINE]`."""

import sys

from medusa_engine.runtime.engine import Engine
from medusa_engine.runtime.errors import UserError

try:
    engine = Engine.open(sys.argv[1] if len(sys.argv) > 1 else "engines/smollm2-135m")
    for piece in engine.stream([{"role": "user", "content": "Name three rivers."}], max_new_tokens=32):
        print(piece.text, end="", flush=True)
    print()
except UserError as error:  # what is wrong, and what to do about it
    sys.exit(str(error))
