"""The one error that a user's mistake raises; command lines print it as two lines and exit 1."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what the user gave: a file, a value, a prompt.

    Args:
        problem: one line saying what is wrong with which file or value.
        hint: one line saying what to do about it.
    """

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(f"{problem}\n{hint}")
        self.problem = problem
        self.hint = hint
