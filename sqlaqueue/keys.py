"""Primary keys of jobs: their type, their text, and how runs are grouped by claim."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

Key = tuple[Any, ...]
"""The primary key of one job: a tuple even if the table's key is one column."""


class _ClaimedRun(Protocol):
    @property
    def key(self) -> Key: ...
    @property
    def token(self) -> Any: ...


def key_text(key: Sequence[Any]) -> str:
    """Return a key as text, unique among the keys of its queue: ``5``, or ``5,de`` for a composite key.

    The option ``--key`` of the command line accepts this text.
    """
    if len(key) == 1:
        return str(key[0])
    # CSV quotes a part that contains a comma, so that two keys never have the same text.
    line = io.StringIO()
    csv.writer(line).writerow(map(str, key))
    return line.getvalue().removesuffix("\r\n")


def key_value(key: Sequence[Any]) -> Any:
    """Return the value of a key of one column, or the tuple of a composite key."""
    return key[0] if len(key) == 1 else tuple(key)


def keys_from(returned: Iterable[Any], width: int) -> list[Key]:
    """Return as tuples the keys that a statement returned: plain values where the key has a ``width`` of 1."""
    return [(value,) for value in returned] if width == 1 else [tuple(row) for row in returned]


def keys_by_token(runs: Iterable[_ClaimedRun]) -> dict[Any, list[Key]]:
    """Return the keys of runs, grouped by the token of the claim that started them."""
    claims: dict[Any, list[Key]] = {}
    # Runs of one claim are mostly neighbours, and comparing two tokens is cheaper than hashing one.
    for token, some in groupby(runs, key=attrgetter("token")):
        claims.setdefault(token, []).extend(run.key for run in some)
    return claims
