"""Psycopg with the statements of sqlaqueue: those that a Consumer sends for one batch, recorded and replayed.

The difference to sqlaqueue is the cost of the library and the ORM. The statements, connections and commits are those of
the recorded batch; only keys and tokens differ. With the option ``orm`` SQLAlchemy makes instances of claimed rows, and
each column is read.
"""

from __future__ import annotations

import pickle
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import psycopg
import sqlalchemy as sa
from psycopg.types.json import Jsonb
from sqlalchemy.orm import Session, sessionmaker

from docs.benchmarks.systems.protocol import Meter, main, payloads
from docs.benchmarks.systems.sqlaqueue_consumer import SqlaqueueAdapter, reader
from sqlaqueue import Consumer

ROUNDS = 8


@dataclass
class Step:
    """A statement or, without one, a commit.

    :param connection: the number of its connection, from 0.
    """

    connection: int
    statement: str | None = None
    parameters: Mapping[str, Any] | None = None


class Replay(SqlaqueueAdapter):
    """Records a Consumer in `prepare`, and replays its statements in `work`."""

    def prepare(self) -> Any:
        prepared = super().prepare()
        steps = self._record()
        with psycopg.connect(self.url) as connection:
            connection.execute("CREATE TABLE recording (steps bytea)")
            connection.execute("INSERT INTO recording VALUES (%s)", (pickle.dumps(steps),))
        return prepared

    def _record(self) -> list[Step]:
        """Return the steps of one batch, from a claim to the next one."""
        engine = sa.create_engine(self.driver_url)
        with Session(engine) as session:
            session.add_all(self.model(**job) for job in payloads(ROUNDS * self.options["batch"]))
            session.commit()
        steps = _record_steps(engine)
        arguments = {"batch_size": self.options["batch"], "batch": True}
        Consumer(self.model, lambda _session, _jobs: None, sessionmaker(engine), **arguments).drain()
        engine.dispose()
        with psycopg.connect(self.url) as connection:
            tables = connection.execute(
                "SELECT string_agg(format('%I', tablename), ', ') FROM pg_tables WHERE schemaname = 'public'"
            )
            (names,) = tables.fetchone() or ("",)
            connection.execute(f"TRUNCATE {names} RESTART IDENTITY".encode())
        return _one_round(steps, self._is_claim)

    def work(self, meter: Meter) -> None:
        with psycopg.connect(self.url) as connection:
            (recorded,) = connection.execute("SELECT steps FROM recording").fetchone() or (b"",)
        steps: list[Step] = pickle.loads(recorded)  # noqa: S301 - written above
        connections = [self._connect(meter) for _ in range(1 + max(step.connection for step in steps))]
        rounds = [(connections[step.connection], step.statement, _filler(step.parameters)) for step in steps]
        meter.wait_for_go()
        while True:
            keys: list[int] = []
            token = uuid.uuid4()
            for connection, statement, fill in rounds:
                if statement is None:
                    connection.commit()
                elif self._is_claim(statement):
                    keys = connection.claim(statement, fill(keys, token))
                    if not keys:
                        break
                else:
                    connection.send(statement, fill(keys, token))
            if not keys:
                # The last batch may be settled in the transaction of the empty claim.
                for connection in connections:
                    connection.commit()
                time.sleep(0.05)

    def _connect(self, meter: Meter) -> Rows | Instances:
        if self.options.get("orm"):
            return Instances(sa.create_engine(self.driver_url), self.model, partial(reader(self.columns, meter), None))
        return Rows(self.url, self.columns.index("sent"), meter)


class Rows:
    """A connection of psycopg, which returns tuples.

    :param place: the index of the column ``sent``.
    """

    def __init__(self, url: str, place: int, meter: Meter) -> None:
        self._connection, self._place, self._meter = psycopg.connect(url), place, meter
        self.commit = self._connection.commit

    def claim(self, statement: str, parameters: Mapping[str, Any]) -> list[int]:
        """Claim jobs, handle them, and return their keys."""
        rows = self._connection.execute(statement.encode(), parameters).fetchall()
        for row in rows:
            self._meter.done(row[self._place])
        return [row[0] for row in rows]

    def send(self, statement: str, parameters: Mapping[str, Any]) -> None:
        """Execute another statement."""
        cursor = self._connection.execute(statement.encode(), parameters)
        cursor.fetchall() if cursor.description else None


class Instances:
    """A session of SQLAlchemy, which returns instances.

    :param handle: called with each instance.
    """

    def __init__(self, engine: sa.Engine, model: Any, handle: Callable[[Any], None]) -> None:
        self._session = Session(engine, expire_on_commit=False)
        self._model, self._handle = model, handle
        self._claims: dict[str, Any] = {}

    def claim(self, statement: str, parameters: Mapping[str, Any]) -> list[int]:
        """Claim jobs, handle them, and return their keys."""
        if statement not in self._claims:
            text = re.sub(r"%\((\w+)\)s", r":\1", statement.replace(":", r"\:")).replace("%%", "%")
            columns = sa.text(text).columns(*self._model.__table__.c)
            self._claims[statement] = sa.select(self._model).from_statement(columns)
        jobs = self._session.scalars(self._claims[statement], parameters).all()
        for job in jobs:
            self._handle(job)
        return [job.id for job in jobs]

    def send(self, statement: str, parameters: Mapping[str, Any]) -> None:
        """Execute another statement."""
        result = self._session.connection().exec_driver_sql(statement, dict(parameters))
        result.all() if result.returns_rows else None

    def commit(self) -> None:
        """Commit, and expunge the instances."""
        self._session.commit()
        self._session.expunge_all()


def _record_steps(engine: sa.Engine) -> list[Step]:
    """Return a list to which all statements and commits are appended."""
    steps: list[Step] = []
    numbers: dict[int, int] = {}

    def number(connection: sa.Connection) -> int:
        return numbers.setdefault(id(connection.connection.driver_connection), len(numbers))

    @sa.event.listens_for(engine, "before_cursor_execute")
    def sent(connection: sa.Connection, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        steps.append(Step(number(connection), statement, parameters))

    @sa.event.listens_for(engine, "commit")
    def committed(connection: sa.Connection) -> None:
        steps.append(Step(number(connection)))

    return steps


def _one_round(steps: list[Step], is_claim: Callable[[str], bool]) -> list[Step]:
    """Return the shortest sequence of steps from one claim to the next, as others include maintenance."""
    claims = [
        n
        for n, step in enumerate(steps)
        if step.statement and "SKIP LOCKED" in step.statement and is_claim(step.statement)
    ]
    parts = [steps[begin:end] for begin, end in pairwise(claims)]
    whole = [part for part in parts if sum(bool(_keys_of(step.parameters)) for step in part)]
    chosen = min(whole[1:], key=len)
    used = {step.connection for step in chosen if step.statement}
    numbers = {connection: number for number, connection in enumerate(sorted(used))}
    return [
        Step(numbers[step.connection], step.statement, step.parameters) for step in chosen if step.connection in numbers
    ]


def _keys_of(parameters: Mapping[str, Any] | None) -> Any:
    lists = [value for value in (parameters or {}).values() if _is_array(value) or (isinstance(value, list) and value)]
    return lists[0] if lists else []


def _is_array(value: Any) -> bool:
    """Return whether a parameter is an array of keys as text."""
    return isinstance(value, str) and re.fullmatch(r"\{\d+(,\d+)*\}", value) is not None


def _filler(parameters: Mapping[str, Any] | None) -> Callable[[list[int], uuid.UUID], dict[str, Any]]:
    """Return a function that makes the parameters of a step from the keys and the token of a round."""
    fixed = dict(parameters or {})
    arrays: list[str] = []
    keys: list[str] = []
    texts: list[str] = []
    documents: list[str] = []
    tokens: list[str] = []
    for name, value in fixed.items():
        if isinstance(value, uuid.UUID):
            tokens.append(name)
        elif _is_array(value):
            arrays.append(name)
        elif isinstance(value, Jsonb) and isinstance(value.obj, list) and value.obj:
            documents.append(name)
        elif isinstance(value, list) and value:
            (keys if isinstance(value[0], int) else texts).append(name)

    def fill(of_keys: list[int], token: uuid.UUID) -> dict[str, Any]:
        made = dict(fixed)
        made.update(dict.fromkeys(tokens, token))
        made.update(dict.fromkeys(keys, of_keys))
        if arrays:
            made.update(dict.fromkeys(arrays, "{" + ",".join(map(str, of_keys)) + "}"))
        if texts or documents:
            key_texts = [str(key) for key in of_keys]
            made.update(dict.fromkeys(texts, key_texts))
            made.update(dict.fromkeys(documents, Jsonb(key_texts)))
        return made

    return fill


if __name__ == "__main__":
    main(Replay)
