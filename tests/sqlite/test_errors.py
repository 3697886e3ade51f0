"""Errors of SQLite have the SQLSTATE that PostgreSQL would have raised, by which the library classifies them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from sqlaqueue.sql.engine import sqlstate, violated_column, violated_constraint

if TYPE_CHECKING:
    from tests.sqlite.bench import SQLiteBench

pytestmark = pytest.mark.once

TABLE = """
CREATE TABLE thing (
  id integer PRIMARY KEY, name text UNIQUE, n integer NOT NULL CHECK (n > 0),
  other integer REFERENCES thing (id) ON DELETE RESTRICT
)
"""
STATES = {
    "INSERT INTO thing VALUES (1, 'b', 1, NULL)": ("23505", "thing.id", None),
    "INSERT INTO thing VALUES (2, 'a', 1, NULL)": ("23505", "thing.name", None),
    "INSERT INTO thing VALUES (2, 'b', NULL, NULL)": ("23502", None, "n"),
    "INSERT INTO thing VALUES (2, 'b', 0, NULL)": ("23514", "", None),
    "INSERT INTO thing VALUES (2, 'b', 1, 9)": ("23503", "", None),
    "DELETE FROM thing WHERE id = 1": ("23503", "", None),
    "DELETE FROM thing WHERE id = 5": ("23000", None, None),
    "INSERT INTO missing VALUES (1)": ("42P01", None, None),
    "SELECT missing FROM thing": ("42703", None, None),
    "INSERT INTO thing (id, missing) VALUES (2, 1)": ("42703", None, None),
    "INSERT INTO thing VALUES (3, randomblob(100000), 1, NULL)": ("53100", None, None),
    "ROLLBACK TO nowhere": ("3B001", None, None),
}


@pytest.mark.parametrize("api", ["sync"])
@pytest.mark.parametrize("statement", STATES)
def test_an_error_has_its_state(bench: SQLiteBench, statement: str) -> None:
    bench.execute(TABLE)
    bench.execute("INSERT INTO thing VALUES (1, 'a', 1, NULL), (4, 'd', 1, 1), (5, 'e', 1, NULL)")
    bench.execute(
        "CREATE TRIGGER kept BEFORE DELETE ON thing WHEN OLD.id = 5 BEGIN SELECT RAISE(ABORT, 'it is kept'); END"
    )
    with bench.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA foreign_keys = ON")
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        # A statement that does nothing, so that a transaction has begun.
        connection.execute(sa.text("DELETE FROM thing WHERE id = 9"))
        with pytest.raises(sa.exc.DBAPIError) as raised:
            connection.execute(sa.text(statement))
        connection.exec_driver_sql("PRAGMA max_page_count = 1000000")
        connection.rollback()
        connection.exec_driver_sql("PRAGMA foreign_keys = OFF")
    error = raised.value
    found = sqlstate(error), violated_constraint(error), violated_column(error)
    assert found == STATES[statement]


@pytest.mark.parametrize("url", ["file:{path}?mode=ro&uri=true", "{path}/missing/jobs.db"])
def test_a_consumer_ends_whose_file_cannot_be_written(bench: SQLiteBench, url: str) -> None:
    """Trying again would not help."""
    path = bench.file.path
    bench.enqueue()
    bench.engine.dispose()
    driver = "+aiosqlite" if bench.api == "async" else ""
    bench.file.url = lambda _="psycopg": f"sqlite{driver}:///{url.format(path=path)}"  # type: ignore[method-assign] # for the Consumer alone
    with pytest.raises(sa.exc.OperationalError, match="readonly database|unable to open"):
        bench.consumer().run()
