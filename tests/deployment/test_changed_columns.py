"""What older processes do beside a table that a newer version of the program has changed, as the documentation says.

Each change is made while an older worker runs. Then an older and a newer program enqueue, and a newer worker ends what
the older one leaves.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, mapped_column, sessionmaker

from sqlaqueue import Consumer, QueueConfig, QueueMixin
from tests.deployment.test_changed_models import running
from tests.models import new_base
from tests.programs import ROOT, wait_until

pytestmark = [pytest.mark.once, pytest.mark.parametrize("engine", ["postgresql"], indirect=True)]

Columns = Mapping[str, Callable[[], Any]]


class Kind(enum.Enum):
    letter = 1


class NewKind(enum.Enum):
    letter = 1
    parcel = 2


def text(**options: Any) -> Callable[[], Any]:
    return lambda: mapped_column(sa.String(20), **{"nullable": False, **options})


def number() -> Any:
    return mapped_column(sa.Integer(), nullable=True)


def kind(values: type[enum.Enum]) -> Callable[[], Any]:
    return lambda: mapped_column(sa.Enum(values, name="kind"), nullable=False)


@dataclass(frozen=True)
class Change:
    """A change of a table, and what the documentation says of it."""

    migration: Sequence[str]
    """What ``alembic upgrade head`` executes while the older worker runs."""
    old: Columns = field(default_factory=dict)
    new: Columns = field(default_factory=dict)
    old_job: Mapping[str, Any] = field(default_factory=dict)
    new_job: Mapping[str, Any] = field(default_factory=dict)
    older_enqueues: bool = True
    newer_enqueues: bool = True
    newer_job: Literal["runs", "left", "claims fail"] = "runs"
    """What the older worker does with a job of the newer program."""


ADD = "ALTER TABLE email ADD COLUMN note VARCHAR(20)"
NOTE = text(nullable=True)
CHANGES = {
    "a new column that may be NULL": [Change([ADD], new={"note": NOTE}, new_job={"note": "x"})],
    "a new `NOT NULL` column with a server default": [
        Change([f"{ADD} NOT NULL DEFAULT ''"], new={"note": text(server_default="")}, new_job={"note": "x"})
    ],
    "a new `NOT NULL` column without a server default": [
        Change(
            [f"{ADD} NOT NULL DEFAULT ''", "ALTER TABLE email ALTER COLUMN note DROP DEFAULT"],
            new={"note": text()},
            new_job={"note": "x"},
            older_enqueues=False,
        ),
        # The first of the two steps.
        Change([f"{ADD} NOT NULL DEFAULT ''"], new={"note": text()}, new_job={"note": "x"}),
    ],
    "a column that is dropped": [
        Change(
            ["ALTER TABLE email DROP COLUMN note"], old={"note": NOTE}, older_enqueues=False, newer_job="claims fail"
        ),
        # Before the migration.
        Change([], old={"note": NOTE}, old_job={"note": "x"}),
    ],
    "a `NOT NULL` column that is dropped": [
        Change([], old={"note": text()}, old_job={"note": "x"}, newer_enqueues=False),
        Change(["ALTER TABLE email ALTER COLUMN note DROP NOT NULL"], old={"note": NOTE}, old_job={"note": "x"}),
    ],
    "a column that is renamed": [
        Change(
            ["ALTER TABLE email RENAME COLUMN note TO remark"],
            old={"note": NOTE},
            new={"remark": NOTE},
            new_job={"remark": "x"},
            older_enqueues=False,
            newer_job="claims fail",
        ),
        Change(
            ["ALTER TABLE email ADD COLUMN remark VARCHAR(20)"],
            old={"note": NOTE},
            new={"note": NOTE, "remark": NOTE},
            new_job={"note": "x", "remark": "x"},
        ),
    ],
    "a column whose type changes": [
        Change(
            ["ALTER TABLE email ALTER COLUMN note TYPE INTEGER USING 0"],
            old={"note": NOTE},
            new={"note": number},
            old_job={"note": "x"},
            new_job={"note": 1},
            older_enqueues=False,
        ),
        # The older handler gets a text where its code expects a number.
        Change(
            ["ALTER TABLE email ALTER COLUMN size TYPE VARCHAR(20)"],
            old={"size": number},
            new={"size": NOTE},
            old_job={"size": 1},
            new_job={"size": "large"},
        ),
    ],
    "a new constraint": [
        Change(
            ["ALTER TABLE email ADD CONSTRAINT ck_note CHECK (note <> '') NOT VALID"],
            old={"note": NOTE},
            new={"note": NOTE},
            old_job={"note": ""},
            new_job={"note": "x"},
            older_enqueues=False,
        )
    ],
    "an index": [Change(["CREATE INDEX CONCURRENTLY ix_note ON email (note)"], old={"note": NOTE}, new={"note": NOTE})],
    "a new value of an enum": [
        Change(
            ["ALTER TYPE kind ADD VALUE 'parcel'"],
            old={"kind": kind(Kind)},
            new={"kind": kind(NewKind)},
            old_job={"kind": Kind.letter},
            new_job={"kind": NewKind.parcel},
            newer_job="left",
        )
    ],
}


def make(columns: Columns) -> Any:
    made = {name: column() for name, column in columns.items()}
    body = {"__module__": __name__, "__tablename__": "email", "id": mapped_column(sa.Integer, primary_key=True), **made}
    return type("Email", (QueueMixin, new_base()), {**body, "__queue__": QueueConfig()})


def enqueue(engine: sa.Engine, job: Any) -> int | None:
    """Enqueue a job; return its key, or None if the database refuses it."""
    with Session(engine) as session:
        session.add(job)
        try:
            session.commit()
        except DBAPIError:
            return None
        return int(job.id)


def state(engine: sa.Engine, key: int | None) -> str:
    with engine.connect() as connection:
        return str(connection.exec_driver_sql(f"SELECT status FROM email WHERE id = {key}").scalar_one())


@pytest.mark.parametrize(
    ("change", "step"), [(name, step) for name, steps in CHANGES.items() for step in range(len(steps))]
)
def test_older_processes_beside_a_changed_table(engine: sa.Engine, change: str, step: int) -> None:
    given = CHANGES[change][step]
    old, new = make(given.old), make(given.new)
    old.metadata.create_all(engine)
    first = enqueue(engine, old(**given.old_job))
    with running(engine, old) as consumer:
        wait_until(lambda: state(engine, first) == "completed")
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for statement in given.migration:
                connection.exec_driver_sql(statement)
        older = enqueue(engine, old(**given.old_job))
        assert (older is not None) == given.older_enqueues
        newer = enqueue(engine, new(**given.new_job))
        assert (newer is not None) == given.newer_enqueues
        if given.newer_job == "claims fail":
            wait_until(lambda: "restart this process with that version" in str(consumer.health().problems))
        for key in (older, newer if given.newer_job == "runs" else None):
            if key is not None:
                wait_until(lambda key=key: state(engine, key) == "completed")  # type: ignore[misc] # mypy cannot infer it
        assert newer is None or state(engine, newer) == ("completed" if given.newer_job == "runs" else "pending")
    ran = list[int]()
    Consumer(new, lambda _session, job: ran.append(job.id), sessionmaker(engine)).drain()
    assert ran == ([] if given.newer_job == "runs" else [newer])


def test_the_documentation_has_these_changes(engine: sa.Engine) -> None:
    page = (ROOT / "docs" / "migrations.md").read_text()
    (table,) = re.findall(r"\| change of your columns .*?\n\n", page, re.DOTALL)
    rows = re.findall(r"^\| (an? .*?) \|", table, re.MULTILINE)
    assert [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", row) for row in rows] == [*CHANGES]
