"""One input: whether the target takes it, or refuses it as it documents."""

import contextlib
import signal
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

from tests.fuzz.targets import Target

LONGEST_MESSAGE = 1_000
"""Characters, besides the input, which a message may repeat with ten for one: ``\\U0010ffff``."""

TIME_LIMIT = 5.0
"""Seconds of the processor for one input, which takes less than a millisecond. They do not depend on other programs."""


class Hang(BaseException):
    """An input has taken too long. No parser catches this."""


class Outcome(NamedTuple):
    problem: str
    """What is wrong, or an empty text."""
    is_accepted: bool


def problem_of(target: Target, text: str) -> Outcome:
    """Let a target read a text, and return what is wrong with how it does."""
    try:
        with _limited():
            target.read(text)
    except target.errors as error:
        message = str(error)
        if not message.strip():
            return Outcome(f"{type(error).__name__} has no message", is_accepted=False)
        if len(message) > LONGEST_MESSAGE + 10 * len(text):
            return Outcome(f"the message has {len(message)} characters", is_accepted=False)
        return Outcome("", is_accepted=False)
    except Hang:
        return Outcome(f"it takes more than {TIME_LIMIT} seconds", is_accepted=False)
    except Exception as error:  # noqa: BLE001 - any other error is what is looked for
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(f"{type(error).__name__}: {str(error)[:200]} in {where.name}()", is_accepted=False)
    return Outcome("", is_accepted=True)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def hang(_number: int, _frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGVTALRM, hang)
    signal.setitimer(signal.ITIMER_VIRTUAL, TIME_LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
