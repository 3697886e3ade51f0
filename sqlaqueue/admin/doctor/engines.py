"""What is wrong on SQLite and on MariaDB: tables, indexes, the search of a claim, the file or the server.

The checks of jobs, leases, Consumers and schedules are in :mod:`.service`, for all engines.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from sqlaqueue._typing import AnySelect
from sqlaqueue.admin.doctor.examination import Examination, Finding, missing_column
from sqlaqueue.engines.checks import lacking_parts
from sqlaqueue.postgresql.checks_of import checks_of
from sqlaqueue.postgresql.facts import Severity
from sqlaqueue.postgresql.faults import MIGRATION, tables_of
from sqlaqueue.queue.names import SCHEDULE
from sqlaqueue.queue.retry_policies import seconds
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import INSUFFICIENT_PRIVILEGE, OtherEngine, exists_on, schema_of, sqlstate
from sqlaqueue.sql.types import object_name
from sqlaqueue.texts import duration_text


@contextlib.contextmanager
def careful(examination: Examination) -> Iterator[None]:
    """Let statements change nothing on SQLite, and take no longer than the limits on MariaDB, until the block ends."""
    connection, limits = examination.connection, examination.thresholds
    if connection.dialect.name == "sqlite":
        before = f"PRAGMA query_only = {_value(connection, 'PRAGMA query_only')}"
        connection.exec_driver_sql("PRAGMA query_only = ON")
    else:
        statement, lock = connection.exec_driver_sql("SELECT @@max_statement_time, @@lock_wait_timeout").one()
        before = f"SET SESSION max_statement_time = {statement}, lock_wait_timeout = {lock}"
        # Zero would be no limit. Locks of tables are waited for in whole seconds, and rows are read without locks.
        longest = max(0.001, limits.statement_timeout.total_seconds())
        most = math.ceil(limits.lock_timeout.total_seconds())
        connection.exec_driver_sql(f"SET SESSION max_statement_time = {longest}, lock_wait_timeout = {most}")
    try:
        yield
    finally:
        # With the connection, its settings are lost as well.
        if not (connection.invalidated or connection.closed):
            connection.exec_driver_sql(before)


def _value(connection: sa.Connection, query: str, *parameters: Any) -> Any:
    return connection.exec_driver_sql(query, tuple(parameters)).scalar()


def _other(examination: Examination) -> OtherEngine:
    return cast("OtherEngine", examination.other)


def _name(connection: sa.Connection, table: sa.Table) -> str:
    """Return the name of a table for SQL."""
    preparer = connection.dialect.identifier_preparer
    schema = schema_of(connection, table)
    return f"{preparer.quote_schema(schema)}.{preparer.quote(table.name)}" if schema else preparer.quote(table.name)


# -- tables and indexes ------------------------------------------------------------------------------------------------


def check_missing_tables(examination: Examination) -> Iterator[Finding]:
    """Find tables and columns that the database lacks."""
    connection = examination.connection
    for spec in examination.specs:
        tables = tables_of(spec)
        lacking = [*lacking_parts(connection, tables)]
        missing = [part for part in lacking if isinstance(part, sa.Table)]
        everything = len(missing) == len(tables)
        for table in missing[:1] if everything else missing:
            name = _name(connection, table)
            database = connection.engine.url.database
            yield Finding(
                severity="critical",
                code="missing_table",
                queue=spec.name,
                summary=(
                    f"The database {database} has no table of this queue. Is it the right database?"
                    if everything
                    else f"The table {name} is missing."
                ),
                consequence=(
                    f"{spec.model.__name__} cannot be used: jobs are not enqueued, or no Consumer starts. "
                    "Base.metadata.create_all(engine) creates what is missing."
                ),
                fixes=(MIGRATION, *_creation(examination, missing if everything else [table])),
                facts={"tables": [_name(connection, each) for each in missing]},
            )
        if not missing:
            yield from (_missing_column(examination, spec, part) for part in lacking if isinstance(part, sa.Column))


def _creation(examination: Examination, tables: list[sa.Table]) -> tuple[str, ...]:
    """Return the statements that create tables; none if one of them has a trigger, which create_all() adds."""
    if any(table.name == SCHEDULE for table in tables):
        return ()
    statements = [
        each
        for table in tables
        for each in (
            sa.schema.CreateTable(table),
            *(sa.schema.CreateIndex(index) for index in sorted(table.indexes, key=lambda index: str(index.name))),
        )
    ]
    return ("\n".join(map(examination.text, statements)),)


def _missing_column(examination: Examination, spec: QueueSpec, column: sa.Column[Any]) -> Finding:
    connection = examination.connection
    dialect: Any = connection.dialect
    specification = str(sa.schema.CreateColumn(column).compile(dialect=dialect))
    name = f"{_name(connection, column.table)}.{dialect.identifier_preparer.quote(column.name)}"
    add = f"ALTER TABLE {_name(connection, column.table)} ADD COLUMN {specification};"
    # SQLite adds no column to a table with rows whose default is an expression.
    refused = dialect.name == "sqlite" and "DEFAULT (" in specification
    return missing_column(examination, spec, name, () if refused else (add,))


def check_missing_indexes(examination: Examination) -> Iterator[Finding]:
    """Find indexes that the database lacks."""
    connection = examination.connection
    checks = checks_of(connection)
    for spec in examination.specs:
        needed = checks.missing_indexes(connection, spec)
        indexes = {
            index for table in tables_of(spec) for index in table.indexes if exists_on(index, connection.dialect)
        }
        others = indexes.difference(needed)
        for index in (*needed, *sorted(others, key=lambda each: str(each.name))):
            table = cast("sa.Table", index.table)
            # The column of the index of unique jobs may be there on MariaDB, which knows IF NOT EXISTS for both.
            creation = sa.schema.CreateIndex(index, if_not_exists=connection.dialect.name != "sqlite")
            if index in others and (index.name is None or checks.has_index(connection, table, index.name)):
                continue
            # Statements on MariaDB name the indexes of claims and rescues.
            refused = index in spec.claim_indexes and getattr(_other(examination), "needs_indexes", False)
            if index in needed and index.unique:
                consequence = (
                    "Jobs are not unique, and enqueue() fails. If the fix reports a duplicate key, cancel or delete "
                    "one of the jobs that have this key, and repeat it."
                )
            elif refused:
                consequence = "Statements that name it fail with error 1176, and no Consumer starts."
            elif index in needed:
                consequence = "Claims or rescues read the whole table."
            else:
                consequence = "Statements that it is for read the whole table."
            yield Finding(
                severity="critical" if refused or (index in needed and index.unique) else "warning",
                code="missing_index",
                queue=spec.name,
                summary=f"The index {index.name} of {_name(connection, table)} is missing.",
                consequence=consequence,
                fixes=(examination.text(creation), MIGRATION),
                facts={"index": str(index.name)},
            )


# -- the search of a claim ---------------------------------------------------------------------------------------------


def check_claim_search(examination: Examination) -> Iterator[Finding]:
    """Find claims that do not find their jobs by the index of claims, in its order; small tables are left out.

    The jobs are searched as a claim does, by a SELECT without its locks and changes. Threshold: ``small_table``.
    """
    connection, small = examination.connection, examination.thresholds.small_table
    on_mariadb = connection.dialect.name != "sqlite"
    for spec in examination.specs:
        name = object_name("ix", spec.table.name, "queue", "claim")
        index = next((each for each in spec.claim_indexes if str(each.name) == name), None)
        if index is None or not _is_larger(connection, spec.table, small):
            continue
        creation, table = examination.text(sa.schema.CreateIndex(index)), _name(connection, spec.table)
        missing = {each.name for each in checks_of(connection).missing_indexes(connection, spec)}
        if index.name in missing:
            reason, fixes = f"the index {name} is missing", [creation]
        elif _is_found_by(examination, spec, name):
            continue
        else:
            fixes = [f"-- Restart the workers then: connections keep the statistics.\nANALYZE {table};"]
            reason = f"the planner does not use the index {name}"
            if _is_altered(connection, name, creation):
                reason = f"the index {name} has another definition than the model's"
                fixes = [f"{examination.text(sa.schema.DropIndex(index))}\n{creation}"]
        yield Finding(
            severity="critical" if on_mariadb else "warning",
            code="claim_reads_table",
            queue=spec.name,
            summary=(
                f"Each claim reads or sorts the whole table {spec.table.name}, of more than {small} rows: {reason}."
            ),
            consequence=(
                "A claim locks all rows that it reads, so that the claims of other workers find none."
                if on_mariadb
                else "The more jobs there are, the longer each claim takes, and the longer other writers wait."
            ),
            fixes=tuple(fixes),
            facts={"index": name, "rows_more_than": small},
        )


def _is_larger(connection: sa.Connection, table: sa.Table, rows: int) -> bool:
    first: AnySelect = sa.select(sa.literal_column("1")).select_from(table).limit(rows + 1)
    number: int = connection.execute(
        sa.select(sa.func.count()).select_from(first.subquery("sqlaqueue_first"))
    ).scalar_one()
    return number > rows


def _is_found_by(examination: Examination, spec: QueueSpec, index: str) -> bool:
    """Return whether due jobs are read from an index, in its order."""
    connection = examination.connection
    quoted = connection.dialect.identifier_preparer.quote(index)
    pending = [spec.in_state("pending")] if spec.has("status") else []
    jobs = sa.select(*spec.keys).where(*pending, *spec.due(spec.columns.get("run_at")))
    # Claims on MariaDB name the index; SQLite passes over the hint.
    jobs = jobs.order_by(*spec.claim_order).limit(10).with_hint(spec.table, f"FORCE INDEX ({quoted})")
    text = examination.text(jobs)
    options = {"no_parameters": True}
    if connection.dialect.name == "sqlite":
        found = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", execution_options=options)
        steps = [str(row[3]) for row in found]
        if any("TEMP B-TREE" in step for step in steps):
            return False
        return any(index in step.split() for step in steps) or _are_first_pending(examination, spec)
    rows = connection.exec_driver_sql(f"EXPLAIN {text}", execution_options=options).mappings().all()
    return all(row["key"] == index and "filesort" not in (row["Extra"] or "") for row in rows)


def _are_first_pending(examination: Examination, spec: QueueSpec) -> bool:
    """Return whether the first rows, as a claim reads them without an index, have a pending job.

    SQLite rightly reads the table if its own order is that of claims, and most jobs are pending.
    """
    first: AnySelect = sa.select(spec.columns["status"].label("status")).order_by(*spec.claim_order)
    rows = first.limit(examination.thresholds.small_table).subquery("sqlaqueue_first")
    pending: AnySelect = (
        sa.select(sa.literal_column("1")).select_from(rows).where(rows.c.status == spec.literal("pending"))
    )
    return examination.connection.execute(pending.limit(1)).scalar() is not None


def _is_altered(connection: sa.Connection, name: str, creation: str) -> bool:
    """Return whether an index that the planner does not use has another definition than that of its creation."""
    if connection.dialect.name != "sqlite":
        # The statement of a claim names the index.
        return True
    found = _value(connection, "SELECT sql FROM sqlite_master WHERE type = 'index' AND name = ?", name)
    existing, wanted = (re.sub(r'[\s";]', "", str(each)).lower() for each in (found, creation))
    return existing != wanted


# -- the file of SQLite ------------------------------------------------------------------------------------------------


def _file(connection: sa.Connection) -> str:
    """Return the path of the file; an empty text for a database in memory."""
    names = {row[1]: row[2] for row in connection.exec_driver_sql("PRAGMA database_list")}
    return str(names.get("main") or "")


_REMOVE_PRAGMA = 'Remove the PRAGMA from the program\'s listeners to "connect": prepare() sets what is needed.'


def check_journal_mode(examination: Examination) -> Iterator[Finding]:
    """Find that the file has no write-ahead log, or that a listener of the program undoes it for each connection.

    For the latter another connection is opened: SQLite refuses to change the mode while two of them are open.
    """
    connection = examination.connection
    path = _file(connection)
    if not path:
        return
    mode = str(_value(connection, "PRAGMA journal_mode"))
    if mode != "wal":
        yield Finding(
            severity="critical",
            code="journal_mode",
            summary=f"The file {path} has the journal mode {mode.upper()} instead of WAL.",
            consequence=(
                'Workers and programs wait for each other\'s transactions, and fail with "database is locked". If the '
                f"mode changes back after the fix, the program sets it when it connects. {_REMOVE_PRAGMA} A file on a "
                "network drive cannot have WAL; move it to a local disk."
            ),
            fixes=("PRAGMA journal_mode = WAL;",),
            facts={"journal_mode": mode},
        )
        return
    engine = connection.engine
    pool = engine.pool.recreate()
    try:
        pool.connect().close()
    except engine.dialect.loaded_dbapi.OperationalError as error:
        yield Finding(
            severity="critical",
            code="second_connection",
            summary=f"Another connection of this engine to {path} fails: {error}.",
            consequence=(
                "Workers need several. Most likely the program sets another journal mode when it connects, which "
                f"prepare() sets back to WAL. {_REMOVE_PRAGMA}"
            ),
            facts={"error": str(error)},
        )
    finally:
        pool.dispose()


def check_write_ahead_log(examination: Examination) -> Iterator[Finding]:
    """Find a write-ahead log that has grown, or that nothing writes back to the file.

    Threshold: ``wal_size``.
    """
    connection, most = examination.connection, examination.thresholds.wal_size
    path = _file(connection)
    if not path:
        return
    with contextlib.suppress(FileNotFoundError):
        size = Path(f"{path}-wal").stat().st_size
        if size > most:
            yield Finding(
                severity="warning",
                code="large_wal",
                summary=f"The write-ahead log {path}-wal has {size / 1024**2:.0f} MB.",
                consequence=(
                    "Reads and claims become slower. A transaction that reads for long keeps it from being written "
                    "back: the fix then reports 1 in its first column. End that transaction, and repeat it."
                ),
                fixes=("PRAGMA wal_checkpoint(TRUNCATE);",),
                facts={"size": size},
            )
    if _value(connection, "PRAGMA wal_autocheckpoint") == 0:
        yield Finding(
            severity="warning",
            code="autocheckpoint_off",
            summary="Connections of this engine never write the write-ahead log back: wal_autocheckpoint is 0.",
            consequence=f"The log grows, and reads become slower, unless another program does. {_REMOVE_PRAGMA}",
            fixes=("PRAGMA wal_checkpoint(TRUNCATE);",),
            facts={"wal_autocheckpoint": 0},
        )


_SYNCHRONOUS: dict[int, tuple[Severity, str, str]] = {
    0: ("critical", "OFF", "After a crash of the machine the file may be corrupt; jobs may be lost or run twice."),
    1: (
        "notice",
        "NORMAL",
        "A crash of the machine may lose the last commits: an added job, or the end of a run, which then runs again.",
    ),
}


def check_file_settings(examination: Examination) -> Iterator[Finding]:
    """Find settings of the connection with which commits are lost or locks are not waited for, and a read-only file.

    Threshold: ``busy_timeout``.
    """
    connection = examination.connection
    path = _file(connection)
    if not path:
        return
    level = _value(connection, "PRAGMA synchronous")
    if level in _SYNCHRONOUS:
        severity, name, consequence = _SYNCHRONOUS[level]
        yield Finding(
            severity=severity,
            code="synchronous_off" if level == 0 else "synchronous_normal",
            summary=f"The setting synchronous of this engine's connections is {name}.",
            consequence=f"{consequence} The program sets it when it connects: use FULL, SQLite's default.",
            fixes=("PRAGMA synchronous = FULL;",),
            facts={"synchronous": level},
        )
    least = examination.thresholds.busy_timeout
    milliseconds = int(_value(connection, "PRAGMA busy_timeout"))
    if milliseconds < least.total_seconds() * 1000:
        yield Finding(
            severity="warning",
            code="short_busy_timeout",
            summary=f"Connections of this engine wait for the write lock for {milliseconds} ms only.",
            consequence=(
                'Claims, ends of jobs and handlers fail with "database is locked" while another transaction writes. '
                "Use prepare(engine, busy_timeout=30), and remove PRAGMA busy_timeout from the program's listeners."
            ),
            fixes=("PRAGMA busy_timeout = 30000;",),
            facts={"milliseconds": milliseconds},
        )
    # The log is a file of its own in the folder.
    refused = [each for each in (path, str(Path(path).parent)) if not os.access(each, os.W_OK)]
    if refused:
        yield Finding(
            severity="critical",
            code="read_only_file",
            summary=f"The user of this process may not write to {' and '.join(refused)}.",
            consequence="No job can be added, claimed or ended. If workers have another user, examine it as theirs.",
            fixes=(f"chmod u+w {' '.join(map(shlex.quote, refused))}",),
            facts={"paths": refused},
        )


# -- the server of MariaDB ---------------------------------------------------------------------------------------------


def check_storage(examination: Examination) -> Iterator[Finding]:
    """Find tables without transactions, and keys in a character set for which statements use no index."""
    connection = examination.connection
    for spec in examination.specs:
        for table in dict.fromkeys((spec.table, *spec.side_tables.values())):
            found = _stored(connection, "engine", "tables", table)
            # None for a view.
            if found not in {None, "InnoDB"}:
                yield Finding(
                    severity="critical",
                    code="storage_engine",
                    queue=spec.name,
                    summary=f"The storage engine of the table {table.name} is {found}.",
                    consequence="It has no transactions and no locks of rows, so no Consumer starts.",
                    fixes=(f"ALTER TABLE {_name(connection, table)} ENGINE = InnoDB;",),
                    facts={"table": table.name, "engine": found},
                )
        for key in spec.keys:
            found = _stored(connection, "character_set_name", "columns", spec.table, column_name=key.name)
            if found not in {None, "utf8mb4"}:
                yield Finding(
                    severity="critical",
                    code="key_character_set",
                    queue=spec.name,
                    summary=f"The character set of the column {spec.table.name}.{key.name} is {found}.",
                    consequence="Statements with several keys would use no index, so no Consumer starts.",
                    fixes=(f"ALTER TABLE {_name(connection, spec.table)} CONVERT TO CHARACTER SET utf8mb4;",),
                    facts={"column": key.name, "character_set": found},
                )


def _stored(connection: sa.Connection, what: str, catalog: str, table: sa.Table, **names: str) -> Any:
    """Return what the server has about a table, or about a column of it."""
    given = {"table_schema": schema_of(connection, table) or sa.func.database(), "table_name": table.name, **names}
    facts: AnySelect = sa.select(sa.column(what)).select_from(sa.table(catalog, schema="information_schema"))
    return connection.scalar(facts.where(*(sa.column(name) == value for name, value in given.items())))


def check_server_settings(examination: Examination) -> Iterator[Finding]:
    """Find settings of the server or of the session with which jobs are lost, or workers wait for long."""
    connection = examination.connection
    if _value(connection, "SELECT @@global.read_only"):
        yield Finding(
            severity="critical",
            code="read_only_server",
            summary="The server is read-only, as a replica is.",
            consequence="No job can be added, claimed or ended. Give workers the address of the primary.",
            fixes=("-- Only if this is the primary.\nSET GLOBAL read_only = OFF;",),
        )
    level = connection.get_isolation_level()
    if level != "READ COMMITTED":
        yield Finding(
            severity="notice",
            code="isolation_level",
            summary=f"Transactions of this session start at {level}.",
            consequence=(
                "Statements of a program that claims or ends jobs by itself lock the gaps between rows as well, "
                "and meet more deadlocks. Leave isolation_level out of create_engine(); Consumers do not need it."
            ),
            fixes=("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;",),
            facts={"isolation_level": level},
        )
    flush = _value(connection, "SELECT @@global.innodb_flush_log_at_trx_commit")
    if flush not in {1, 3}:
        of_what = "the server or the machine" if flush == 0 else "the machine"
        yield Finding(
            severity="notice",
            code="flush_log_off",
            summary=f"Commits do not wait for the disk: innodb_flush_log_at_trx_commit is {flush}.",
            consequence=(
                f"A crash of {of_what} may lose the last commits: a job that was added just before, or the end of a "
                "run, which then runs again. Unless it is meant, set it in the server's configuration file as well."
            ),
            fixes=("SET GLOBAL innodb_flush_log_at_trx_commit = 1;",),
            facts={"innodb_flush_log_at_trx_commit": flush},
        )
    timeout = int(_value(connection, "SELECT @@innodb_lock_wait_timeout"))
    for spec in examination.specs:
        lease = seconds(spec.config.lease)
        if timeout >= lease:
            yield Finding(
                severity="notice",
                code="long_lock_timeout",
                queue=spec.name,
                summary=(
                    f"A statement waits {duration_text(timeout)} for the lock of a row, which is no less than the "
                    f"lease of {duration_text(lease)}: innodb_lock_wait_timeout is {timeout}."
                ),
                consequence=(
                    "A lease may expire while its worker waits, and another worker runs the job again. Set it in the "
                    "server's configuration file as well."
                ),
                fixes=(f"SET GLOBAL innodb_lock_wait_timeout = {max(1, int(lease) // 10)};",),
                facts={"seconds": timeout, "lease": lease},
            )


def check_connections(examination: Examination) -> Iterator[Finding]:
    """Find that the server has hardly any connection left.

    Threshold: ``connections_used``.
    """
    connection = examination.connection
    used = int(connection.exec_driver_sql("SHOW GLOBAL STATUS LIKE 'Threads_connected'").one()[1])
    limit = int(_value(connection, "SELECT @@global.max_connections"))
    if used >= examination.thresholds.connections_used * limit:
        yield Finding(
            severity="warning",
            code="connections_used",
            summary=f"{used} of the server's {limit} connections are in use.",
            consequence=(
                "When none is left, workers and programs that add jobs cannot connect. Set max_connections in the "
                "server's configuration file as well."
            ),
            fixes=(f"SET GLOBAL max_connections = {2 * limit};",),
            facts={"used": used, "limit": limit},
        )


_HISTORY = "SELECT count FROM information_schema.innodb_metrics WHERE name = 'trx_rseg_history_len'"

# A transaction's start is in the time zone of the server's machine, whatever that of the session is.
_TRANSACTIONS = """
    SET STATEMENT time_zone = 'SYSTEM' FOR
    SELECT t.trx_mysql_thread_id AS id, TIMESTAMPDIFF(SECOND, t.trx_started, NOW()) AS seconds,
        p.user AS user, p.host AS host, t.trx_query IS NULL AS is_idle
    FROM information_schema.innodb_trx AS t
    LEFT JOIN information_schema.processlist AS p ON p.id = t.trx_mysql_thread_id
    WHERE t.trx_mysql_thread_id <> CONNECTION_ID() AND t.trx_mysql_thread_id <> 0
    ORDER BY t.trx_started
"""


def check_history(examination: Examination) -> Iterator[Finding]:
    """Find old versions of rows that are not removed, and the transactions that keep them.

    Thresholds: ``history_length``, ``transaction_open``.
    """
    connection, limits = examination.connection, examination.thresholds
    try:
        length = int(_value(connection, _HISTORY) or 0)
        transactions: Any = connection.exec_driver_sql(_TRANSACTIONS).all()
    except DBAPIError as error:
        if sqlstate(error) != INSUFFICIENT_PRIVILEGE:
            raise
        user, _, host = str(_value(connection, "SELECT CURRENT_USER()")).rpartition("@")
        yield Finding(
            severity="notice",
            code="hidden_sessions",
            summary=f"The user {user}@{host} may not see what other sessions do.",
            consequence="It is unknown whether a transaction keeps old versions of rows, and how many there are.",
            fixes=(f"GRANT PROCESS ON *.* TO '{user}'@'{host}';",),
        )
        return
    if length > limits.history_length:
        yield Finding(
            severity="warning",
            code="long_history",
            summary=f"The server keeps old versions of rows of {length} transactions (history list length).",
            consequence=(
                "Each claim has to skip them. An open transaction keeps them, which is a finding of its own, or "
                "the server removes them too slowly."
            ),
            fixes=("SET GLOBAL innodb_purge_threads = 8;",),
            facts={"history_length": length},
        )
    for each in transactions:
        if each.seconds < limits.transaction_open.total_seconds():
            continue
        doing = "and executes nothing" if each.is_idle else "and executes a statement"
        yield Finding(
            severity="warning",
            code="idle_in_transaction" if each.is_idle else "long_transaction",
            summary=(
                f"Session {each.id} (user {each.user}, client {each.host}) has a transaction since "
                f"{duration_text(each.seconds)}, {doing}."
            ),
            consequence="The server keeps the old versions of all rows that change since then, and the rows it locked.",
            fixes=(f"-- Rolls its transaction back.\nKILL {each.id};",),
            facts={"id": each.id, "seconds": each.seconds, "user": each.user, "client": each.host},
        )
