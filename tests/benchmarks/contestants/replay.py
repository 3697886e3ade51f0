"""Psycopg alone, with the statements of sqlaqueue: what a Consumer sends for one batch, recorded and sent again.

Between this and sqlaqueue lies the price of the library and of the ORM. The statements of one batch are taken as they
come, whichever strategy sends them, over as many connections, with the same commits; only keys and tokens are new in
each round. With the option ``orm`` SQLAlchemy makes instances of what is claimed, of which each column is read, and
nothing else is done for a job.
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

from sqlaqueue import Consumer
from tests.benchmarks.contestants.ours import Ours, reader
from tests.benchmarks.contestants.protocol import Meter, main, payloads

ROUNDS = 8


@dataclass
class Step:
    """A statement or, without one, a commit.

    :param connection: which of the connections it goes to, counted from 0.
    """

    connection: int
    statement: str | None = None
    parameters: Mapping[str, Any] | None = None


class Replay(Ours):
    """A Consumer of sqlaqueue is watched while the schema is made."""

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
        steps = _watch(engine)
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
                # The end of the last batch may belong to the transaction of the claim that found nothing.
                for connection in connections:
                    connection.commit()
                time.sleep(0.05)

    def _connect(self, meter: Meter) -> Rows | Instances:
        if self.options.get("orm"):
            return Instances(sa.create_engine(self.driver_url), self.model, partial(reader(self.columns, meter), None))
        return Rows(self.url, self.columns.index("sent"), meter)


class Rows:
    """A connection of psycopg, which returns tuples.

    :param place: where in each there is what the meter wants to know.
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
    """The same by a session of SQLAlchemy, which returns instances.

    :param handle: is called with each.
    """

    def __init__(self, engine: sa.Engine, model: Any, handle: Callable[[Any], None]) -> None:
        self._session = Session(engine, expire_on_commit=False)
        self._model, self._handle = model, handle
        self._claims: dict[str, Any] = {}

    def claim(self, statement: str, parameters: Mapping[str, Any]) -> list[int]:
        """Claim jobs, handle them, and return their keys."""
        if statement not in self._claims:
            words = re.sub(r"%\((\w+)\)s", r":\1", statement.replace(":", r"\:")).replace("%%", "%")
            columns = sa.text(words).columns(*self._model.__table__.c)
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
        """Commit, and let go of the instances."""
        self._session.commit()
        self._session.expunge_all()


def _watch(engine: sa.Engine) -> list[Step]:
    """Return the list to which everything that is sent from now on is added."""
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
    """Return what is sent from one claim to the next: the shortest such part, for in others something is tended."""
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
    """Whether a parameter is an array of keys as text."""
    return isinstance(value, str) and re.fullmatch(r"\{\d+(,\d+)*\}", value) is not None


def _filler(parameters: Mapping[str, Any] | None) -> Callable[[list[int], uuid.UUID], dict[str, Any]]:
    """Return what makes the parameters of a step, of the keys and the token of a round."""
    fixed = dict(parameters or {})
    arrays: list[str] = []
    keys: list[str] = []
    words: list[str] = []
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
            (keys if isinstance(value[0], int) else words).append(name)

    def fill(of_keys: list[int], token: uuid.UUID) -> dict[str, Any]:
        made = dict(fixed)
        made.update(dict.fromkeys(tokens, token))
        made.update(dict.fromkeys(keys, of_keys))
        if arrays:
            made.update(dict.fromkeys(arrays, "{" + ",".join(map(str, of_keys)) + "}"))
        if words or documents:
            texts = [str(key) for key in of_keys]
            made.update(dict.fromkeys(words, texts))
            made.update(dict.fromkeys(documents, Jsonb(texts)))
        return made

    return fill


if __name__ == "__main__":
    main(Replay)
