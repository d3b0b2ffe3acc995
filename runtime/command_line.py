"""What every command does around its work: errors in two lines, exit codes, quiet interruption."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from medusa_engine.runtime.errors import UserError

EXIT_USER_ERROR = 1
EXIT_INTERRUPTED = 130


def run_command(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], None],
    arguments: Sequence[str] | None,
) -> int:
    """Parse the arguments and run the command.

    Returns:
        0 when done; 1 after a `UserError`, printed to standard error as one line saying what is wrong and one
        saying what to do; 130 when interrupted. Wrong usage exits with 2 from the parser.
    """
    options = parser.parse_args(arguments)
    try:
        run(options)
        sys.stdout.flush()
    except UserError as error:
        print(f"{parser.prog}: {error.problem}\n{parser.prog}: {error.hint}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone; keep Python from writing to the pipe again while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_USER_ERROR
    return 0
