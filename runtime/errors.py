"""The one error that a user's mistake raises; command lines print it as two lines and exit 1."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what the user gave: a file, a value, a prompt.

    Args:
        problem: one line saying what is wrong with which file or value.
        hint: one line saying what to do about it.
        file: where the mistake is, put before `problem`; for errors that a server's clients see without it.

    Attributes:
        problem: with the file.
        problem_without_file: for readers who do not know the files of this machine.
        hint: as given.
    """

    def __init__(self, problem: str, hint: str, *, file: object = None) -> None:
        self.problem = problem if file is None else f"{file}: {problem}"
        self.problem_without_file = problem
        self.hint = hint
        super().__init__(f"{self.problem}\n{hint}")


class WrongValueError(UserError):
    """A parameter's value that is not taken; a command puts its option in the place of the parameter's name.

    Args:
        name: of the parameter: `max_new_tokens`.
        value: as messages show it.
        hint: one line saying what is taken.

    Attributes:
        name, value: as given.
    """

    def __init__(self, name: str, value: str, hint: str) -> None:
        super().__init__(f"{name} is {value}", hint)
        self.name = name
        self.value = value
