"""What tree searches can be told, for a command line that loads no library to say it."""

from __future__ import annotations

COUNTS = ("marginal", "joint")  # what a path can be weighed with; the paper's comes first and wins a tie
AUTO = "auto"  # whichever of COUNTS publishes more on held-out answers
