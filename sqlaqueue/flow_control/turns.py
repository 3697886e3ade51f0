"""In which order a claim under flow control visits the jobs: group by group, until it has enough.

A group is a part of the pending jobs that one scan of an index reads in order. The groups of one priority come before
those of the next one. Where keys take turns, each turn is a group, and the turns begin behind the last one that this
process has seen (:class:`Turns`); once each key had its turn, a second cycle takes what is left.

The first group of a turn is its *window*: its first due jobs, whatever their keys. If jobs that are held back fill the
window, the jobs behind it are visited key by key, so that a million jobs of one key cost one descent of an index. These
groups are called *parts*. The first ones are those in which a place has become free, as far as a Consumer knows
(:mod:`sqlaqueue.flow_control.freed`). The others, a few or all, follow from a random key on, since the claims that find
the window full must not favour some. Of turns a claim visits a few or all as well, and then those known to be free.

The next group is found by a recursive query. Nothing is read for groups that a claim does not reach.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.flow_control.freed import MOST_PARTS, freed_keys, freed_number
from sqlaqueue.flow_control.keys import FlowControl, JobKey, TurnKey, flow_control
from sqlaqueue.postgresql.claim_scan import cursor_priority
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import ScanRange
from sqlaqueue.sql.types import key_hash, nullable_array

# -- turns -------------------------------------------------------------------------------------------------------------
# Whose turn it is: the last keys that this process has claimed jobs of, by priority.
#
# It is memory of the process, and nothing is written for it. Each process takes turns by itself.


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

    def last(self, level: Any) -> tuple[tuple[Any, ...] | None, int]:
        """Return the last key of a priority, and of how many jobs in a row; None and 0 if there was none."""
        return self._last.get(level, (None, 0))

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


# -- groups ------------------------------------------------------------------------------------------------------------

_ONE = sa.literal_column("1", sa.Integer())
_ZERO = sa.literal_column("0", sa.Integer())
_LEAST = sa.literal_column("'-9223372036854775808'::bigint", sa.BigInteger())
_NO_PART = sa.cast(sa.null(), sa.BigInteger())
_WINDOW = sa.cast(_ZERO, sa.BigInteger())
_FIRST = sa.cast(_ONE, sa.BigInteger())


def _random_key() -> int:
    return secrets.randbits(64) - 2**63


class Groups:
    """The groups of one claim.

    Their columns: ``level``, the priority; ``cycle``, 1 while each key has its turn and 2 for what is left; ``turn``,
    the hash of the key whose turn it is; ``visited``, its number among the turns of the level, negative for a key that
    a Consumer knows to be free; ``place``, the number of a part, from 1, and 0 for a window; ``part``, the hash of its
    key, NULL for a window; ``turns_restarted`` and ``parts_restarted``, whether turns and parts have begun anew at the
    least hash, 0 or 1.

    :param limit: the most jobs to claim.
    :param one: whether all jobs are one group, of all priorities.
    :param cursor: limits the windows to the jobs from the cursor of a claim on, and the groups to its priority.
    """

    def __init__(
        self,
        flow: FlowControl,
        limit: sa.ColumnElement[int],
        *,
        one: bool = False,
        cursor: ScanRange | None = None,
    ) -> None:
        self.flow, self.limit, self.one, self.cursor = flow, limit, one, cursor

    @property
    def turn(self) -> TurnKey | None:
        """Whose jobs take turns."""
        return None if self.one else self.flow.turn

    @property
    def part(self) -> JobKey | None:
        return None if self.one else self.flow.part

    @property
    def order(self) -> list[sa.Column[Any]]:
        """The claim order within a priority."""
        return [column for column in self.spec.claim_order if column is not self.spec.columns.get("priority")]

    @property
    def spec(self) -> QueueSpec:
        return self.flow.spec

    @property
    def window(self) -> sa.ColumnElement[int]:
        """How many jobs a window has: enough that it is rarely full of jobs that are held back.

        Behind a window of all jobs there are no parts, so it is larger.
        """
        further = sa.literal_column("1000" if self.one else "64", sa.Integer())
        return self.limit * sa.literal_column("4", sa.Integer()) + further

    @cached_property
    def given(self) -> sa.FromClause | None:
        """Where each level's turns begin: ``level``, ``start`` and ``taken``; None without turns."""
        turn = self.turn
        if turn is None:
            return None
        memory = turns_of(self.spec)
        priority = self.spec.columns.get("priority")
        types = {LEVELS: sa.Integer() if priority is None else priority.type, TAKEN: sa.Integer()}
        keys = [column.key for column in turn.columns]
        types |= {column.key: column.type for column in turn.columns}
        arrays = [
            sa.bindparam(None, callable_=memory.reader(name), type_=nullable_array(types[name])) for name in types
        ]
        rows: Any = sa.func.unnest(*arrays).table_valued(
            *(sa.column(name, types[name]) for name in types), name="sqlaqueue_turns"
        )
        rows = rows.render_derived("sqlaqueue_turns")
        known = sa.select(
            rows.c[LEVELS].label("level"),
            key_hash([rows.c[name] for name in keys]).label("last"),
            rows.c[TAKEN].label("taken"),
        )
        last = known.cte("sqlaqueue_last")
        # The key whose turn is over comes last in the next cycle.
        over = last.c.taken >= self.turn_size(last.c.level, last.c.last)
        start = sa.case((over, last.c.last + _ONE), else_=last.c.last)
        return sa.select(last.c.level, start.label("start"), last.c.taken).cte("sqlaqueue_given")

    def turn_size(self, level: sa.ColumnElement[Any], turn: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
        """Return how many jobs one turn of a key has."""
        assert self.turn is not None  # noqa: S101 - only asked for where keys take turns
        weight = self.turn.weight
        if isinstance(self.turn.config.weight, int):
            return weight
        rows = self.spec.table
        of_turn = [*self.waiting(rows), *self.of_level(rows, level), *self.of_turn(rows, turn)]
        some = sa.select(weight).select_from(rows).where(*of_turn).limit(_ONE).correlate_except(rows)
        return sa.func.greatest(sa.func.coalesce(some.scalar_subquery(), _ONE), _ONE, type_=sa.Integer())

    def start(self, level: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
        """Return the hash at which the turns of a level begin."""
        assert self.given is not None  # noqa: S101 - only asked for where keys take turns
        known: Any = sa.select(self.given.c.start).where(self.given.c.level == level).limit(_ONE)
        known = known.correlate_except(self.given).scalar_subquery()
        return sa.func.coalesce(known, _LEAST, type_=sa.BigInteger())

    def taken(self, level: sa.ColumnElement[Any], turn: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
        """Return how many jobs the turn of a key has had already."""
        assert self.given is not None  # noqa: S101 - only asked for where keys take turns
        known = self.given.c
        had: Any = sa.select(known.taken).where(known.level == level, known.start == turn).limit(_ONE)
        had = had.correlate_except(self.given).scalar_subquery()
        return sa.func.coalesce(had, _ZERO, type_=sa.Integer())

    # -- conditions on jobs ----------------------------------------------------------------------------------------

    def waiting(self, rows: sa.FromClause) -> list[sa.ColumnElement[bool]]:
        """Return the conditions that a job in ``rows`` is pending."""
        if not self.spec.has("status"):
            return []
        status = rows.c[self.spec.columns["status"].key]
        return [status == self.spec.literal("pending")]

    def of_level(self, rows: sa.FromClause, level: sa.ColumnElement[Any]) -> list[sa.ColumnElement[bool]]:
        """Return the conditions that a job has a priority."""
        priority = self.spec.columns.get("priority")
        return [] if priority is None or self.one else [rows.c[priority.key] == level]

    def in_window(self, rows: sa.FromClause, level: sa.ColumnElement[Any]) -> list[sa.ColumnElement[bool]]:
        """Return the conditions that a due job may be in a window."""
        if self.cursor is None:
            return self.of_level(rows, level)
        # Of rows, as the condition on the level would keep the scan of the index from beginning at the cursor.
        return [self.cursor([rows.c[column.key] for column in self.spec.claim_order])]

    def of_turn(self, rows: sa.FromClause, turn: sa.ColumnElement[int]) -> list[sa.ColumnElement[bool]]:
        """Return the conditions that a job has the key whose turn it is."""
        return [] if self.turn is None else [self.turn.hashed(rows) == turn]

    # -- the recursion ---------------------------------------------------------------------------------------------

    @cached_property
    def all(self) -> sa.CTE:
        """All groups, in order."""
        first = self._first_of_level(self._levels(None), "sqlaqueue_first")
        if self.one or not (self.part or self.turn or self._has_levels):
            return sa.select(*first.c).cte("sqlaqueue_group")
        groups = sa.select(*first.c).cte("sqlaqueue_group", recursive=True)
        steps = [
            self._first_of(step, groups, f"sqlaqueue_step_{number}") for number, step in enumerate(self._steps(groups))
        ]
        any_step = sa.union_all(*(sa.select(*step.c) for step in steps)).subquery("sqlaqueue_steps")
        nearest = sa.select(*any_step.c).limit(_ONE).lateral("sqlaqueue_next")
        return groups.union_all(sa.select(*nearest.c).select_from(groups.join(nearest, sa.true())))

    @staticmethod
    def _first_of(step: AnySelect, groups: sa.FromClause, name: str) -> sa.FromClause:
        return step.correlate(groups).limit(_ONE).lateral(name)

    def _steps(self, groups: sa.CTE) -> Iterator[AnySelect]:
        """Yield the ways to the next group, the nearest first."""
        c = groups.c
        part, turn = self.part, self.turn
        if part is not None:
            entered = sa.or_(c.place > _ZERO, self._is_window_full(c.level, c.turn))
            ways = [
                self._first_of(way, groups, f"sqlaqueue_part_{number}")
                for number, way in enumerate(self._parts(groups, part))
            ]
            any_part = sa.union_all(*(sa.select(*way.c) for way in ways)).subquery("sqlaqueue_any_part")
            yield sa.select(*any_part.c).where(entered)
        if turn is not None:
            start, few = self.start(c.level), sa.and_(c.visited > _ZERO, c.visited < MOST_PARTS)
            for turns_restarted, key, more in self._rotation(turn, c.turns_restarted, c.turn, start):
                yield self._turns(c.level, c.cycle, turns_restarted, key, more, visited=c.visited + _ONE).where(few)
            for turns_restarted, key, more in self._rotation(turn, None, None, start):
                again = self._turns(c.level, c.cycle + _ONE, turns_restarted, key, more, visited=c.visited + _ONE)
                yield again.where(c.cycle == _ONE, few)
            yield self._freed_turns(groups, turn)
        if self._has_levels:
            yield sa.select(*self._first_of_level(self._levels(c.level), "sqlaqueue_of_level").c)

    def _freed_turns(self, groups: sa.CTE, turn: TurnKey) -> AnySelect:
        """Return the way to the next turn of those that are free, once the others had theirs."""
        c, freed = groups.c, freed_keys(turn)
        # Its jobs may have been visited already.
        restarted = _ONE.label("turns_restarted")
        parts = [_ZERO.label("parts_restarted"), _WINDOW.label("place"), _NO_PART.label("part")]
        found = sa.select(c.level, _ONE.label("cycle"), restarted, freed.c.part.label("turn"), -freed.c.place, *parts)
        return found.where(freed.c.place == sa.func.greatest(-c.visited, _ZERO) + _ONE)

    def _parts(self, groups: sa.CTE, part: JobKey) -> Iterator[AnySelect]:
        """Yield the ways to the next part: those that are free, and then the others by their hashes."""
        c = groups.c
        free: sa.ColumnElement[int] = _ZERO
        same = [c.level, c.cycle, c.turns_restarted, c.turn, c.visited]
        if self.turn is None:
            freed = freed_keys(part)
            free = freed_number(part)
            known = sa.select(*same, _ZERO.label("parts_restarted"), freed.c.place, freed.c.part)
            yield known.where(freed.c.place == c.place + _ONE)
        last = sa.case((c.place > free, c.part))
        for parts_restarted, key, (rows, where) in self._rotation(part, c.parts_restarted, last, self._random):
            inside = [*self.waiting(rows), *self.of_level(rows, c.level), *self.of_turn(rows, c.turn)]
            number = sa.func.greatest(c.place, free) + _ONE
            found = sa.select(*same, parts_restarted.label("parts_restarted"), number.label("place"), key.label("part"))
            few = number - free <= MOST_PARTS
            yield found.select_from(rows).where(*inside, *where, c.place >= free, few).order_by(key)

    @cached_property
    def _random(self) -> sa.ColumnElement[int]:
        return sa.bindparam(None, callable_=_random_key, type_=sa.BigInteger())

    def _turns(
        self,
        level: sa.ColumnElement[Any],
        cycle: sa.ColumnElement[int],
        turns_restarted: sa.ColumnElement[int],
        key: sa.ColumnElement[int],
        more: tuple[sa.FromClause, Sequence[sa.ColumnElement[bool]]],
        *,
        visited: sa.ColumnElement[int] | None = None,
    ) -> AnySelect:
        rows, where = more
        found = sa.select(
            level.label("level"),
            cycle.label("cycle"),
            turns_restarted.label("turns_restarted"),
            key.label("turn"),
            (_FIRST if visited is None else visited).label("visited"),
            _ZERO.label("parts_restarted"),
            _WINDOW.label("place"),
            _NO_PART.label("part"),
        )
        return found.select_from(rows).where(*self.waiting(rows), *self.of_level(rows, level), *where).order_by(key)

    def _rotation(
        self,
        job_key: JobKey,
        turns_restarted: sa.ColumnElement[int] | None,
        last: sa.ColumnElement[int] | None,
        start: sa.ColumnElement[int],
    ) -> Iterator[
        tuple[sa.ColumnElement[int], sa.ColumnElement[int], tuple[sa.FromClause, list[sa.ColumnElement[bool]]]]
    ]:
        """Yield the two ways to the next key: a greater one, and those before the start once there is none.

        :param turns_restarted: whether it has begun anew already; None for the first key.
        :param last: the hash of the last key; None, or NULL, for the first key.
        """
        for number, value in enumerate((_ZERO, _ONE)):
            rows = self.spec.table.alias(self._name())
            key = job_key.hashed(rows)
            if last is None or turns_restarted is None:
                where = [key >= start] if number == 0 else [key <= start]
            elif number == 0:
                where = [
                    turns_restarted == _ZERO,
                    key >= sa.func.coalesce(last + _ONE, start),
                ]
            else:
                where = [key >= sa.case((turns_restarted == _ONE, last + _ONE), else_=_LEAST), key <= start]
            yield value, key, (rows, where)

    def _name(self) -> str:
        self._names.append("")
        return f"sqlaqueue_job_{len(self._names)}"

    @cached_property
    def _names(self) -> list[str]:
        return []

    @property
    def _has_levels(self) -> bool:
        return self.spec.has("priority") and self.cursor is None

    def _levels(self, last: sa.ColumnElement[Any] | None) -> sa.FromClause:
        """Return the level after ``last``, or the first one."""
        priority = self.spec.columns.get("priority")
        if priority is None or self.one:
            return sa.select(_ZERO.label("level")).lateral("sqlaqueue_level")
        if self.cursor is not None:
            return sa.select(cursor_priority(self.spec).label("level")).lateral("sqlaqueue_level")
        rows = self.spec.table.alias(self._name())
        level = rows.c[priority.key]
        after = [] if last is None else [level > last]
        found = sa.select(level.label("level")).where(*self.waiting(rows), *after).order_by(level).limit(_ONE)
        return found.correlate_except(rows).lateral("sqlaqueue_level" if last is None else "sqlaqueue_next_level")

    def _first_of_level(self, levels: sa.FromClause, name: str) -> sa.FromClause:
        level = levels.c.level
        if self.turn is None:
            found = sa.select(
                level,
                _ONE.label("cycle"),
                _ZERO.label("turns_restarted"),
                sa.cast(_ZERO, sa.BigInteger()).label("turn"),
                _FIRST.label("visited"),
                _ZERO.label("parts_restarted"),
                _WINDOW.label("place"),
                _NO_PART.label("part"),
            )
            return found.select_from(levels).lateral(name)
        ways = [
            self._first_of(self._turns(level, _ONE, turns_restarted, key, more), levels, f"{name}_{number}")
            for number, (turns_restarted, key, more) in enumerate(
                self._rotation(self.turn, None, None, self.start(level))
            )
        ]
        any_way = sa.union_all(*(sa.select(*way.c) for way in ways)).subquery(f"{name}_ways")
        nearest = sa.select(*any_way.c).limit(_ONE).lateral(f"{name}_turn")
        return sa.select(*nearest.c).select_from(levels.join(nearest, sa.true())).lateral(name)

    def _is_window_full(self, level: sa.ColumnElement[Any], turn: sa.ColumnElement[int]) -> sa.ColumnElement[bool]:
        rows, size = self.spec.table.alias(self._name()), self.window
        run_at = self.spec.columns.get("run_at")
        due = self.spec.due(None if run_at is None else rows.c[run_at.key])
        where = [*self.waiting(rows), *self.in_window(rows, level), *self.of_turn(rows, turn), *due]
        first = sa.select(_ONE).select_from(rows).where(*where).limit(size).correlate_except(rows)
        count = sa.select(sa.func.count()).select_from(first.subquery("sqlaqueue_in_window"))
        return count.scalar_subquery() >= size
