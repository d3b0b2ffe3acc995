"""Fuzz a parser with atheris, which follows the code that an input reaches: for as long as it is left running.

    python tests/fuzz/fuzz.py tree -max_total_time=60

Other arguments are libFuzzer's. An input that breaks the parser is written to a file, whose name is given then. Needs
the package atheris, which is not among the project's own.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder of this file is there already
with atheris.instrument_imports(include=["medusa_engine"], enable_loader_override=False):
    from parsers import PARSERS, check, seeds

    # What the parsers import when they are called.
    import medusa_engine.exporter.gguf_header
    import medusa_engine.exporter.head_checkpoint
    import medusa_engine.runtime.graph_file
    import medusa_engine.runtime.serve.asked
    import medusa_engine.training.chat_data  # noqa: F401


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in PARSERS:
        sys.exit(f"usage: fuzz.py {{{','.join(PARSERS)}}} [libFuzzer options]")
    name = sys.argv.pop(1)
    with tempfile.TemporaryDirectory() as corpus:
        for index, data in enumerate(seeds(name)):
            (Path(corpus) / str(index)).write_bytes(data)
        atheris.Setup([*sys.argv, corpus], lambda data: check(PARSERS[name], data))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
