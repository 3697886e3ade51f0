"""The record of what was committed: triggers write each change of a job, of a limit and of a rate into tables.

A row of ``change`` tells what its statement saw (``seen``, the snapshot of the statement, which a STABLE function can
ask for) and which transaction wrote it (``xid``). A deferred trigger writes the row of ``committed`` at the end of each
transaction, with a snapshot of that moment. Two rows are then compared by what a snapshot shows, not by clocks:

* Transaction B saw the commit of A if and only if A's ``xid`` is visible in B's snapshot. So whether a run had ended
  when another one began is exact.
* Two transactions that did not see each other are ordered by ``committed.at``. A claim keeps its locks until it is
  committed, so of two claims of one key the second one must see the first one.

No lock is added: locks of the triggers would serialize what is to be tested, and could deadlock with it. Rows of a
transaction that is rolled back vanish with it.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

_SEEN = """
CREATE FUNCTION audit_seen() RETURNS trigger STABLE LANGUAGE plpgsql AS $$
BEGIN
  PERFORM set_config('audit.seen', pg_current_snapshot()::text, true);
  PERFORM set_config('audit.began', extract(epoch FROM statement_timestamp())::text, true);
  RETURN NULL;
END $$;
CREATE TABLE committed (xid bigint PRIMARY KEY, seen text, at double precision);
CREATE FUNCTION audit_committed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO committed
    VALUES (pg_current_xact_id()::text::bigint, pg_current_snapshot()::text, extract(epoch FROM clock_timestamp()))
    ON CONFLICT DO NOTHING;
  RETURN NULL;
END $$;
"""

_TABLE = """
CREATE TABLE {record} (
  seq bigserial PRIMARY KEY,
  op text, before jsonb, after jsonb,
  xid bigint DEFAULT pg_current_xact_id()::text::bigint,
  seen text DEFAULT current_setting('audit.seen'),
  began double precision DEFAULT current_setting('audit.began')::float8,
  at double precision DEFAULT extract(epoch FROM clock_timestamp()),
  origin text DEFAULT current_setting('application_name')
);
CREATE CONSTRAINT TRIGGER audit AFTER INSERT ON {record} DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW EXECUTE FUNCTION audit_committed();
CREATE FUNCTION audit_{table}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO {record} (op, before, after) VALUES (TG_OP, to_jsonb(OLD), to_jsonb(NEW));
  RETURN NULL;
END $$;
-- In the order of their names, and before those of the library, which may change further rows.
CREATE TRIGGER audit_1 AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION audit_seen();
CREATE TRIGGER audit_2 AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION audit_{table}();
"""

RECORDS = {
    "job": "change",
    "tenant": "limit_change",
    "sqlaqueue_rate": "rate_change",
    "sqlaqueue_dead_letter": "letter_change",
}
"""The tables whose changes are recorded, and the tables of the records."""


def install(engine: sa.Engine) -> None:
    """Create the triggers and their tables in a database with the tables of a round."""
    with engine.begin() as connection:
        # Without parameters, as the statements have percent signs of their own.
        connection.exec_driver_sql(_SEEN)
        for table, record in RECORDS.items():
            if sa.inspect(connection).has_table(table):
                connection.exec_driver_sql(_TABLE.format(table=table, record=record))


def read(engine: sa.Engine) -> dict[str, list[Any]]:
    """Return the rows of all records and of ``committed``, and the final rows of jobs and effects."""
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        present = sa.inspect(connection).get_table_names()
        order = dict.fromkeys(RECORDS.values(), "seq") | {"committed": "at", "job": "id", "effect": "id", "mark": "seq"}
        return {
            name: list(connection.execute(sa.text(f"SELECT * FROM {name} ORDER BY {key}"))) if name in present else []
            for name, key in order.items()
        }
