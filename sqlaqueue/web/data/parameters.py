"""Errors about the parameters of a request."""

from __future__ import annotations


class ParameterError(ValueError):
    """A parameter of a request that is malformed, unknown or contradictory.

    :param parameter: its name, as in the URL.
    :param problem: what is wrong with it; it repeats no more of the value than a reader needs.
    """

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"{parameter}: {problem}")
        self.parameter, self.problem = parameter, problem
