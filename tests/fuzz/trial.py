"""One input: whether the target takes it, or refuses it as it documents."""

import traceback
from typing import NamedTuple

from tests.fuzz.targets import Target

LONGEST_MESSAGE = 1_000
"""Characters, besides the input, which a message may repeat."""


class Outcome(NamedTuple):
    problem: str
    """What is wrong, or an empty text."""
    is_accepted: bool


def problem_of(target: Target, text: str) -> Outcome:
    """Let a target read a text, and return what is wrong with how it does."""
    try:
        target.read(text)
    except target.errors as error:
        message = str(error)
        if not message.strip():
            return Outcome(f"{type(error).__name__} has no message", is_accepted=False)
        if len(message) > LONGEST_MESSAGE + 3 * len(text):
            return Outcome(f"the message has {len(message)} characters", is_accepted=False)
        return Outcome("", is_accepted=False)
    except Exception as error:  # noqa: BLE001 - any other error is what is looked for
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(f"{type(error).__name__}: {str(error)[:200]} in {where.name}()", is_accepted=False)
    return Outcome("", is_accepted=True)
