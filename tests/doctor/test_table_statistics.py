"""Tables that VACUUM and ANALYZE neglect, and integer keys that run out: each is named, and the fix repairs it."""

from datetime import timedelta
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Mapped, mapped_column

from sqlaqueue import QueueConfig, QueueMixin
from sqlaqueue.admin.doctor.server import check_claim_indexes
from sqlaqueue.admin.doctor.vacuum import check_autovacuum, check_keys, check_status_statistics, check_table_statistics
from tests.doctor.conftest import apply, codes, examine, find, plain_engine, restart_with
from tests.models import KINDS, make_job, new_base
from tests.servers import Database

CHECKS = [check_autovacuum, check_table_statistics]
ROWS = 30_000


def make_queue(engine: sa.Engine, kind: str = "update_status") -> Any:
    job = make_job(kind)
    job.metadata.create_all(engine)
    return job


def execute(database: Database, *statements: str) -> None:
    """Execute statements, and have the server count the rows that they change."""
    with database.connect() as connection:
        for statement in statements:
            connection.execute(statement.encode())
            connection.execute("SELECT pg_stat_force_next_flush()")
            connection.execute("SELECT 1")


def fill(number: int) -> str:
    return f"INSERT INTO job (payload) SELECT NULL FROM generate_series(1, {number})"


def test_dead_rows_of_a_table_without_autovacuum(database: Database, engine: sa.Engine) -> None:
    job = make_queue(engine)
    execute(database, "ALTER TABLE job SET (autovacuum_enabled = off)")
    disabled = find("autovacuum_disabled", engine, [job], CHECKS)
    assert "public.job" in disabled.summary
    execute(database, fill(ROWS), "ANALYZE job", "UPDATE job SET payload = ''")
    finding = find("dead_rows", engine, [job], CHECKS)
    assert f"public.job has {ROWS} dead rows" in finding.summary
    assert "never" in finding.summary
    assert finding.queue == disabled.queue == "job"
    # The default threshold, and a fifth of the rows.
    assert finding.facts["threshold"] == pytest.approx(50 + 0.2 * ROWS)
    apply(database.dsn, finding.fixes[0])
    assert codes(engine, [job], CHECKS) == ["autovacuum_disabled"]
    # With the other fix autovacuum would have begun earlier.
    apply(database.dsn, finding.fixes[1])
    execute(database, "UPDATE job SET payload = 'again'")
    again = find("dead_rows", engine, [job], CHECKS, vacuum_overdue=timedelta(0))
    assert again.facts["threshold"] == 5000
    assert again.fixes == finding.fixes[:1]
    apply(database.dsn, again.fixes[0])
    apply(database.dsn, disabled.fixes[0])
    assert codes(engine, [job], CHECKS) == []


def test_dead_rows_soon_after_a_vacuum(database: Database, engine: sa.Engine) -> None:
    job = make_queue(engine)
    execute(database, "ALTER TABLE job SET (autovacuum_enabled = off)", fill(ROWS), "VACUUM (ANALYZE) job")
    execute(database, "UPDATE job SET payload = ''")
    assert codes(engine, [job], CHECKS) == ["autovacuum_disabled"]
    assert codes(engine, [job], CHECKS, vacuum_overdue=timedelta(0)) == ["autovacuum_disabled", "dead_rows"]
    assert codes(engine, [job], CHECKS, dead_rows_kept=ROWS - 1) == ["autovacuum_disabled", "dead_rows"]
    assert codes(engine, [job], CHECKS, dead_rows_kept=ROWS) == ["autovacuum_disabled"]


@pytest.mark.parametrize("kind", ["delete_returning", "existing_messages"])
def test_messages_and_side_tables(database: Database, engine: sa.Engine, kind: str) -> None:
    job = make_queue(engine, kind)
    table = "sqlaqueue_message_job" if kind == "delete_returning" else "message"
    for each in (table, "sqlaqueue_consumer"):
        execute(database, f"ALTER TABLE {each} SET (autovacuum_enabled = off)")
    found = examine(engine, [job], CHECKS)
    assert [each.summary.split()[-1] for each in found] == [f"public.{table}.", "public.sqlaqueue_consumer."]
    for finding in found:
        apply(database.dsn, finding.fixes[0])
    assert codes(engine, [job], CHECKS) == []


def test_a_side_table_of_several_queues_is_reported_once(database: Database, engine: sa.Engine) -> None:
    job = make_job.__wrapped__("update_status")  # not one that other tests share

    class Other(job.__bases__[0], job.__bases__[1]):  # type: ignore[misc,name-defined]  # bases of a class made at run time
        __tablename__ = "other"
        id = sa.orm.mapped_column(sa.Integer, primary_key=True)

    job.metadata.create_all(engine)
    execute(database, "ALTER TABLE sqlaqueue_consumer SET (autovacuum_enabled = off)")
    (finding,) = examine(engine, [job, Other], CHECKS)
    assert finding.queue is None


def test_partitions(database: Database, engine: sa.Engine) -> None:
    job = make_job.__wrapped__("update_status")  # not one that other tests share
    job.__table__.dialect_options["postgresql"]["partition_by"] = "RANGE (id)"
    job.metadata.create_all(engine)
    execute(
        database,
        "CREATE TABLE job_1 PARTITION OF job FOR VALUES FROM (1) TO (1000000) WITH (autovacuum_enabled = off)",
        "CREATE TABLE job_2 PARTITION OF job FOR VALUES FROM (1000000) TO (2000000)",
        fill(ROWS),
    )
    found = {each.code: each for each in examine(engine, [job], CHECKS)}
    assert found.keys() == {"autovacuum_disabled", "stale_statistics"}
    assert "public.job_1" in found["stale_statistics"].summary
    apply(database.dsn, found["stale_statistics"].fixes[0])
    apply(database.dsn, found["autovacuum_disabled"].fixes[0])
    assert codes(engine, [job], CHECKS) == []
    assert codes(engine, [job], [check_claim_indexes], index_bloat_size=1, index_bloat_factor=0) != []


def test_never_analyzed(database: Database, engine: sa.Engine) -> None:
    job = make_queue(engine)
    execute(
        database, "ALTER TABLE job SET (autovacuum_enabled = off, autovacuum_vacuum_threshold = 100000)", fill(ROWS)
    )
    execute(
        database,
        "ALTER TABLE job SET (autovacuum_analyze_threshold = 1000000)",
        "ALTER TABLE job RESET (autovacuum_enabled)",
    )
    # As often as the table's own threshold asks for.
    assert codes(engine, [job], CHECKS) == []
    execute(database, "ALTER TABLE job SET (autovacuum_enabled = off, autovacuum_analyze_threshold = 50)")
    finding = find("stale_statistics", engine, [job], CHECKS)
    assert f"public.job are outdated: {ROWS} rows have changed" in finding.summary
    assert "(never)" in finding.summary
    apply(database.dsn, finding.fixes[0])
    assert codes(engine, [job], CHECKS) == ["autovacuum_disabled"]
    execute(database, fill(ROWS))
    assert codes(engine, [job], CHECKS) == ["autovacuum_disabled"]
    assert codes(engine, [job], CHECKS, analyze_overdue=timedelta(0)) == ["autovacuum_disabled", "stale_statistics"]


def test_a_new_table(own: Database, own_engine: sa.Engine) -> None:
    # Autovacuum is on, and has not had the time.
    restart_with(own, "autovacuum_naptime = '1d'")
    job = make_queue(own_engine)
    execute(own, fill(ROWS), "UPDATE job SET payload = ''")
    assert codes(own_engine, [job], CHECKS) == []
    assert codes(own_engine, [job], CHECKS, new_table_rows=ROWS - 1) == ["dead_rows", "stale_statistics"]


def test_a_wrong_number_of_rows(database: Database, engine: sa.Engine) -> None:
    job = make_queue(engine)
    execute(database, "ALTER TABLE job SET (autovacuum_enabled = off)", fill(ROWS), "ANALYZE job")
    overdue = timedelta(0)
    assert codes(engine, [job], CHECKS, analyze_overdue=overdue) == ["autovacuum_disabled"]
    execute(database, "UPDATE pg_class SET reltuples = 7 WHERE oid = 'job'::regclass")
    finding = find("stale_statistics", engine, [job], CHECKS, analyze_overdue=overdue)
    assert "the planner expects 7" in finding.summary
    apply(database.dsn, finding.fixes[0])
    assert codes(engine, [job], CHECKS, analyze_overdue=overdue) == ["autovacuum_disabled"]


@pytest.mark.parametrize("setting", ["autovacuum", "track_counts"])
def test_settings_of_the_server(own: Database, own_engine: sa.Engine, setting: str) -> None:
    apply(own.dsn, f"ALTER SYSTEM SET {setting} = off;\nSELECT pg_reload_conf();")
    job = make_queue(own_engine)
    finding = find(f"{setting}_off", own_engine, [job], CHECKS)
    apply(own.dsn, finding.fixes[0])
    own.kill_backends()
    assert codes(own_engine, [job], CHECKS) == []


def test_wraparound(own: Database, own_engine: sa.Engine) -> None:
    job = make_queue(own_engine)
    # The lowest value that a table may have. Autovacuum is off, or it would freeze the table.
    apply(own.dsn, "ALTER SYSTEM SET autovacuum = off;\nSELECT pg_reload_conf();")
    execute(own, "ALTER TABLE job SET (autovacuum_freeze_max_age = 100000)")
    with own.connect() as connection:
        connection.execute("DO $$ BEGIN FOR i IN 1..101000 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$")
    checks = [check_table_statistics]
    assert codes(own_engine, [job], checks) == []
    finding = find("wraparound", own_engine, [job], checks, freeze_factor=1.0)
    assert "public.job" in finding.summary
    assert finding.severity == "warning"
    critical = examine(own_engine, [job], checks, freeze_critical=100_000)
    assert {each.severity for each in critical} == {"critical"}
    apply(own.dsn, finding.fixes[0])
    assert codes(own_engine, [job], checks, freeze_factor=1.0) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "existing_messages"])
def test_index_bloat(database: Database, engine: sa.Engine, kind: str) -> None:
    job = make_queue(engine, kind)
    limits = {"index_bloat_size": 100_000, "index_bloat_factor": 2.0}
    execute(database, fill(ROWS), "VACUUM (ANALYZE) job")
    if kind == "delete_returning":
        execute(database, "VACUUM (ANALYZE) sqlaqueue_message_job")
    # A full index is as large as estimated.
    assert codes(engine, [job], [check_claim_indexes], **limits) == []
    for each in examine(engine, [job], [check_claim_indexes], index_bloat_size=100_000, index_bloat_factor=0.0):
        assert each.facts["entries"] == ROWS
        assert 0.4 < each.facts["size"] / each.facts["needed"] < 1.6
    if kind == "rows_are_messages":
        execute(database, "DELETE FROM job", "VACUUM (ANALYZE, TRUNCATE off) job")
    else:
        execute(database, "UPDATE job SET status = 'completed'", "VACUUM (ANALYZE) job")
    if kind == "delete_returning":
        execute(database, "VACUUM (ANALYZE) sqlaqueue_message_job")
    assert codes(engine, [job], [check_claim_indexes]) == []
    finding = find("index_bloat", engine, [job], [check_claim_indexes], **limits)
    assert finding.facts["index"] in finding.summary
    assert "estimate" in finding.summary
    apply(database.dsn, finding.fixes[0])
    assert codes(engine, [job], [check_claim_indexes], **limits) == []


@pytest.mark.parametrize("kind", ["update_status", "delete_returning"])
def test_statistics_without_pending_jobs(database: Database, engine: sa.Engine, kind: str) -> None:
    job = make_queue(engine, kind)
    execute(
        database, "INSERT INTO job (status) SELECT 'completed' FROM generate_series(1, 100)", "ANALYZE job", fill(50)
    )
    check, limits = [check_status_statistics], {"changed_rows": 40}
    assert codes(engine, [job], check, **limits) == []
    assert codes(engine, [job], check, deep=True, changed_rows=50) == []
    finding = find("status_statistics", engine, [job], check, deep=True, **limits)
    assert "job" in finding.summary
    assert "status: completed" in finding.summary
    apply(database.dsn, finding.fixes[0])
    assert codes(engine, [job], check, deep=True, **limits) == []


def test_a_table_that_does_not_exist(engine: sa.Engine) -> None:
    job = make_job("delete_returning")
    assert codes(engine, [job], [*CHECKS, check_claim_indexes]) == []
    job.metadata.create_all(plain_engine(engine.url.render_as_string(hide_password=False)))
    assert codes(engine, [job], [*CHECKS, check_claim_indexes]) == []


# -- integer keys that run out, of jobs and of messages ------------------------------------------------------------

CHECK = [check_keys]
INTEGER = 2**31 - 1


def set_value(database: Database, table: str, value: int) -> None:
    with database.connect() as connection:
        connection.execute(f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), {value})".encode())


def insert(database: Database) -> int:
    """Insert a job; the model's own type for the key is still the old one."""
    with database.connect() as connection:
        row = connection.execute("INSERT INTO job DEFAULT VALUES RETURNING id").fetchone()
    assert row is not None
    key: int = row[0]
    return key


@pytest.mark.parametrize("kind", KINDS)
def test_a_serial_key(database: Database, engine: sa.Engine, kind: str) -> None:
    job = make_job(kind)
    job.metadata.create_all(engine)
    set_value(database, "job", int(INTEGER * 0.69))
    assert codes(engine, [job], CHECK) == []
    set_value(database, "job", int(INTEGER * 0.75))
    assert find("keys_run_out", engine, [job], CHECK).severity == "warning"
    set_value(database, "job", INTEGER)
    finding = find("keys_run_out", engine, [job], CHECK)
    assert finding.severity == "critical"
    assert "public.job_id_seq of public.job.id, a column of type integer" in finding.summary
    assert finding.facts["used"] == 1.0
    with pytest.raises(psycopg.errors.SequenceGeneratorLimitExceeded):
        insert(database)
    apply(database.dsn, finding.fixes[0])
    assert codes(engine, [job], CHECK) == []
    assert insert(database) > INTEGER


def test_the_key_of_messages(database: Database, engine: sa.Engine) -> None:
    job = make_job("existing_messages")
    job.metadata.create_all(engine)
    set_value(database, "message", INTEGER)
    finding = find("keys_run_out", engine, [job], CHECK)
    assert "public.message.id" in finding.summary
    apply(database.dsn, finding.fixes[0])
    assert codes(engine, [job], CHECK) == []


def make_keys(*column: Any) -> Any:
    base = new_base()

    class Job(QueueMixin, base):
        __tablename__ = "job"
        __queue__ = QueueConfig()
        id: Mapped[int] = mapped_column(*column, primary_key=True)

    class Child(base):
        __tablename__ = "Child"
        id: Mapped[int] = mapped_column(primary_key=True)
        job_id: Mapped[int] = mapped_column("Job", sa.ForeignKey("job.id"))

    return Job


@pytest.mark.parametrize(
    ("column", "last", "fix"),
    [
        ((sa.SmallInteger, sa.Identity()), 32_767, 'ALTER TABLE public."Child" ALTER COLUMN "Job" TYPE bigint;'),
        ((sa.Integer, sa.Identity()), INTEGER, "ALTER TABLE public.job ALTER COLUMN id TYPE bigint;"),
        ((sa.Integer, sa.Sequence("numbers")), INTEGER, "ALTER TABLE public.job ALTER COLUMN id TYPE bigint;"),
        ((sa.BigInteger, sa.Sequence("numbers", maxvalue=1000)), 1000, "ALTER SEQUENCE public.numbers AS bigint"),
        ((sa.BigInteger, sa.Identity(maxvalue=1000)), 1000, "ALTER SEQUENCE public.job_id_seq AS bigint"),
    ],
    ids=["smallint", "identity", "bigint sequence", "short sequence", "short identity"],
)
def test_other_keys(database: Database, engine: sa.Engine, column: Any, last: int, fix: str) -> None:
    job = make_keys(*column)
    job.metadata.create_all(engine)
    named = isinstance(column[1], sa.Sequence)
    with database.connect() as connection:
        if named:
            connection.execute("ALTER TABLE job ALTER COLUMN id SET DEFAULT nextval('numbers')")
            connection.execute(f"SELECT setval('numbers', {last})".encode())
    if not named:
        set_value(database, "job", last)
    finding = find("keys_run_out", engine, [job], CHECK)
    assert (finding.facts["last"], finding.facts["limit"]) == (last, last)
    assert fix in finding.fixes[0]
    # In the text, as a comment in the fix is read too late.
    assert ("columns of the model to BigInteger before" in finding.consequence) == (column[0] is not sa.BigInteger)
    apply(database.dsn, finding.fixes[0])
    assert codes(engine, [job], CHECK) == []
    assert insert(database) == last + 1
    with database.connect() as connection:
        connection.execute(f'INSERT INTO "Child" ("Job") VALUES ({last + 1})'.encode())


def test_a_bigint_key_has_no_fix(database: Database, engine: sa.Engine) -> None:
    job = make_keys(sa.BigInteger)
    job.metadata.create_all(engine)
    set_value(database, "job", 2**63 - 1)
    assert find("keys_run_out", engine, [job], CHECK).fixes == ()


def test_a_key_without_a_sequence(engine: sa.Engine) -> None:
    job = make_keys(sa.Uuid)
    job.metadata.remove(job.metadata.tables["Child"])
    job.metadata.create_all(engine)
    assert codes(engine, [job], CHECK) == []
