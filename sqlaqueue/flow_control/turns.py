"""Whose turn it is: the last keys that this process has claimed jobs of, by priority.

It is memory of the process, and nothing is written for it. Each process takes turns by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from sqlaqueue.flow_control.controls import flow_control
from sqlaqueue.queue.spec import QueueSpec

LEVELS, TAKEN = "sqlaqueue_level", "sqlaqueue_taken"
"""The names of what is remembered beside the attributes of the key: the priority, and how many jobs in a row."""

_MOST_LEVELS = 100
"""Of how many priorities the last key is remembered."""


class Turns:
    """The last key of each priority of one queue.

    Threads may mix the values of two claims. Then a turn begins at another key, which does no harm.
    """

    def __init__(self, spec: QueueSpec) -> None:
        flow = flow_control(spec)
        assert flow is not None and flow.turn is not None  # noqa: S101, PT018 - only made where keys take turns
        self._columns = {column.key: spec.mapper.get_property_by_column(column).key for column in flow.turn.columns}
        self._priority = spec.attributes.get("priority")
        self._last: dict[Any, tuple[tuple[Any, ...], int]] = {}

    def claimed(self, values: Mapping[str, Any]) -> None:
        """Record that a job was claimed.

        :param values: its loaded attributes.
        """
        level = 0 if self._priority is None else values.get(self._priority)
        key = tuple(values.get(name) for name in self._columns.values())
        last, taken = self._last.pop(level, (None, 0))
        self._last[level] = (key, taken + 1 if key == last else 1)
        if len(self._last) > _MOST_LEVELS:
            self._last.pop(next(iter(self._last)), None)

    def reader(self, name: str) -> Callable[[], list[Any]]:
        """Return a function that returns one column of what is remembered, with an entry for each priority."""
        if name == LEVELS:
            return lambda: [*self._last]
        if name == TAKEN:
            return lambda: [taken for _, taken in [*self._last.values()]]
        number = [*self._columns].index(name)
        return lambda: [key[number] for key, _ in [*self._last.values()]]


_turns: WeakKeyDictionary[QueueSpec, Turns] = WeakKeyDictionary()


def turns_of(spec: QueueSpec) -> Turns:
    """Return the turns of a queue whose keys take turns."""
    known = _turns.get(spec)
    if known is None:
        known = _turns.setdefault(spec, Turns(spec))
    return known
