"""The classes of jobs that tests share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def shared(make: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that makes classes of jobs return the one that it has made for the same arguments.

    The statements of a class that another test has used are compiled already, which takes longer than most of these
    tests. A test that changes its class makes one of its own.
    """
    made: dict[str, Any] = {}

    @wraps(make)
    def find(*arguments: Any, **options: Any) -> Any:
        name = repr((arguments, sorted(options.items())))
        # The text of a function says nothing about what it does.
        if " at 0x" in name:
            return make(*arguments, **options)
        if name not in made:
            made[name] = make(*arguments, **options)
        return made[name]

    return find
