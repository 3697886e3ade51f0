"""Tables and columns with any names: a class is refused when it is mapped, or its jobs are enqueued and run."""

import random
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Session, mapped_column

from sqlaqueue import ConcurrencyLimit, QueueConfig, QueueMixin, Unique, claim, complete, rescue
from sqlaqueue.exc import ConfigurationError
from tests.shared_database import each_engine, shared

__all__ = ["each_engine", "shared"]

pytestmark = pytest.mark.once
SEED = 1
FEW, MANY = 3, 100
"""How many names each engine is tried with, in the default tests and in all."""

WORDS = [
    "select",
    "order",
    "user",
    "table",
    "group",
    "Job",
    "JOBS",
    "job",
    "key",
    "status",
    "id",
    "sqlaqueue_job",
    "all",
]
ODD = [
    " ",
    "  ",
    ".",
    "'",
    '"',
    "`",
    "%",
    "%%",
    "%s",
    "%(a)s",
    ":",
    ":a",
    "::",
    "?",
    "\\",
    "/",
    "$",
    "$$",
    "#",
    "--",
    ";",
]
ODD += ["(", ")", "[", "]", "{", "}", "{0}", ",", "&", "<", "=", "*", "@", "é", "ß", "İ", "名", "\u0301", "_", "1"]
ODD += ["|", "~", "*/"]
LONGEST = {"postgresql": 63, "sqlite": 63, "mariadb": 40}
"""Bytes. In MariaDB it is the name of a file, in which an odd character takes five bytes."""

CONFIGS: list[dict[str, Any]] = [
    {},
    {"attempt_history": timedelta(days=1)},
    {"statistics": True},
    {"unique": Unique("payload")},
    {"flow_control": [ConcurrencyLimit(1, per="payload")]},
]
ON_POSTGRESQL: list[dict[str, Any]] = [*CONFIGS, {"strategy": "delete_returning"}, {"strategy": "batch_select"}]


def random_name(rng: random.Random, longest: int) -> str:
    parts = [rng.choice(WORDS if rng.random() < 0.4 else ODD) for _ in range(rng.randint(1, 6))]
    name = "".join(parts) * rng.choice([1, 1, 1, 10])
    # In SQLite SQLAlchemy takes %( for the start of a parameter; and MariaDB takes no name that ends with a space.
    name = name.replace("%(", "%").encode()[: rng.choice([longest, longest, 30])].decode(errors="ignore").strip()
    return name or "a"


def make_queue(table: str, key: str, payload: str, config: dict[str, Any]) -> Any:
    class Base(DeclarativeBase):
        pass

    body = {
        "__module__": __name__,
        "__tablename__": table,
        "__queue__": QueueConfig(**config),
        "id": mapped_column(key, sa.Integer, primary_key=True),
        "payload": mapped_column(payload, sa.String(50)),
    }
    return type("Job", (QueueMixin, Base), body)


def run_jobs(engine: sa.Engine, model: Any) -> None:
    """Enqueue two jobs, complete one, release the other one by a rollback, and look for expired leases."""
    model.metadata.create_all(engine)
    try:
        with Session(engine) as session:
            session.add_all([model(id=1, payload="a"), model(id=2, payload="b")])
            session.commit()
            [first] = session.scalars(claim(model, 1)).all()
            session.execute(complete(first))
            session.commit()
            [second] = session.scalars(claim(model, 1)).all()
            assert {first.id, second.id} == {1, 2}
            session.rollback()
            if model.__queue__.strategy == "update_status":
                assert session.scalars(rescue(model)).all() == []
    finally:
        model.metadata.drop_all(engine)


def try_names(engine: sa.Engine, number: int, seed: int) -> int:
    """Try tables with random names, and return how many can be mapped."""
    rng, mapped = random.Random(seed), 0
    longest = LONGEST[engine.dialect.name]
    configs = ON_POSTGRESQL if engine.dialect.name == "postgresql" else CONFIGS
    for _ in range(number):
        table, key, payload = (random_name(rng, longest) for _ in range(3))
        config = rng.choice(configs)
        try:
            model = make_queue(table, key, payload, config)
        except (ConfigurationError, sa.exc.ArgumentError):
            continue
        mapped += 1
        try:
            run_jobs(engine, model)
        except Exception as error:
            error.add_note(f"table {table!r}, key {key!r}, payload {payload!r}, {config}")
            raise
    return mapped


@pytest.mark.every_combination
@pytest.mark.parametrize("config", [{}, {"unique": Unique("payload")}], ids=["plain", "unique"])
def test_names_that_would_end_a_comment(each_engine: sa.Engine, config: dict[str, Any]) -> None:
    """The SQL of MariaDB names columns in comments."""
    run_jobs(each_engine, make_queue("a*/|~1", "|*/", "~2", config))


def test_tables_with_odd_names(each_engine: sa.Engine) -> None:
    assert try_names(each_engine, FEW, SEED)


@pytest.mark.thorough
def test_many_tables_with_odd_names(each_engine: sa.Engine, pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("--seed")
    assert try_names(each_engine, pytestconfig.getoption("--inputs") or MANY, SEED if seed is None else seed) > MANY / 2
