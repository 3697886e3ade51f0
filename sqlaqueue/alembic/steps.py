"""Complete what autogenerate has found: tables with rows, tables in use, unique indexes, another strategy."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from alembic.operations import MigrateOperation
from alembic.operations import ops as alembic_ops
from alembic.util import CommandError

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.compare import ComparedTable, DiffContext, is_queue_column
from sqlaqueue.alembic.implementations import VerbatimSql
from sqlaqueue.alembic.operations_on_rows import AddColumns, CreateUniqueIndex
from sqlaqueue.postgresql.catalog_schemas import PREFIX, ReflectedFunction
from sqlaqueue.postgresql.ddl import bare_table, literal_sql
from sqlaqueue.queue.names import SCHEDULE, TICK
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.portable import Span
from sqlaqueue.sql.types import NEUTRAL, object_name

_WHERE = "postgresql_where"
_NEEDS_ESCAPE = re.compile(r"%|(?<!:):(?!:)")


def escape_status_values(diff: DiffContext) -> None:
    """Escape the predicates and defaults in the operations on queues that Alembic renders itself."""
    queues = {table.qualified_name for table in diff.tables if table.belongs_to_queue or diff.was_queue(table)}
    default = diff.context.dialect.default_schema_name
    for found in [*diff.before, *diff.upgrade.ops, *diff.after]:
        for op in found.ops if isinstance(found, alembic_ops.ModifyTableOps) else [found]:
            schema, name = getattr(op, "schema", None), getattr(op, "table_name", getattr(op, "table", None))
            if (None if schema == default else schema, name) in queues:
                _escape(op)


def _escape(op: alembic_ops.MigrateOperation | None) -> None:
    if isinstance(op, alembic_ops.CreateIndexOp | alembic_ops.DropIndexOp):
        text = _predicate_text(op.kw.get(_WHERE))
        if text is not None and _NEEDS_ESCAPE.search(text):
            op.kw = {**op.kw, _WHERE: VerbatimSql(text)}
    elif isinstance(op, alembic_ops.CreateTableOp):
        op.columns = [_escaped(each) if isinstance(each, sa.Column) else each for each in op.columns]
    elif isinstance(op, alembic_ops.AddColumnOp):
        op.column = _escaped(op.column)
    elif isinstance(op, AddColumns):
        op.columns = [_escaped(each) for each in op.columns]
    elif isinstance(op, alembic_ops.AlterColumnOp):
        op.modify_server_default = _escaped_default(op.modify_server_default)
        op.existing_server_default = _escaped_default(op.existing_server_default)
    elif isinstance(op, alembic_ops.DropTableOp | alembic_ops.DropColumnOp):
        _escape(op._reverse)  # noqa: SLF001 - the operation that the downgrade renders
    elif isinstance(op, ops.DropColumns):
        _escape(op.undo)


def _escaped(column: sa.Column[Any]) -> sa.Column[Any]:
    default = _escaped_default(column.server_default)
    if default is column.server_default and not isinstance(column.type, Span):
        return column
    escaped = column._copy()  # noqa: SLF001 - the public copy() was removed, and the column belongs to the model
    escaped.server_default = default
    if isinstance(column.type, Span):
        # A migration contains no type of the library.
        escaped.type = sa.Interval()
    return escaped


def _escaped_default(default: Any) -> Any:
    if not isinstance(default, sa.DefaultClause):
        return default
    # Reflected SQL contains escaped colons.
    text = default.arg.text.replace("\\:", ":") if isinstance(default.arg, sa.TextClause) else literal_sql(default.arg)
    return sa.DefaultClause(VerbatimSql(text)) if _NEEDS_ESCAPE.search(text) else default


def refuse_taken_columns(diff: DiffContext) -> None:
    """Refuse an existing column that has the name of a column of the queue and may have another meaning.

    :raises CommandError: naming the class, the attribute and both fixes.
    """
    for table, database_table, _ in diff.remaining_tables:
        spec = table.spec
        if spec is None or diff.was_queue(table):
            continue
        retyped = table.retyped_columns()
        existing = {column.name: column for column in database_table.columns}
        for role, column in spec.columns.items():
            if not is_queue_column(column) or column.name not in existing:
                continue
            if role == "status" or column.name in retyped:
                raise CommandError(_column_is_taken(spec, role, existing[column.name], column))


def _column_is_taken(spec: QueueSpec, role: str, existing: sa.Column[object], wanted: sa.Column[object]) -> str:
    attribute = spec.attributes[role]
    adopted, renamed = (f"QueueConfig(columns={{{role!r}: {name!r}}})" for name in (attribute, f"queue_{role}"))
    return (
        f"{spec.model.__name__}.{attribute}: the table {spec.table.fullname} has a column {existing.name} of type "
        f"{existing.type!r} already, and is not a queue yet; the queue's {role} would have the type {wanted.type!r}. "
        f"If that column is the queue's {role}, define the attribute in the class and adopt it with {adopted}; if it "
        f"has another meaning, give the queue another attribute with {renamed}"
    )


def ask_for_status(diff: DiffContext) -> None:
    """Add ``existing_rows=...`` to the migration wherever existing rows become jobs, in either direction."""
    for table, *_ in diff.remaining_tables:
        spec = table.spec
        if spec is None or not spec.has("status"):
            ask_in_downgrade(table, diff.pending_condition(table))
        if spec is None:
            continue
        additions = [
            op for op in table.modify_ops.ops if isinstance(op, alembic_ops.AddColumnOp) and is_queue_column(op.column)
        ]
        if spec.has("status"):
            status = spec.columns["status"].name
            if any(op.column.name == status for op in additions):
                _combine(table, additions, status)
        elif _rows_become_messages(diff, table):
            _combine(table, additions, None)
            if not additions:
                diff.before.append(AddColumns(table.name, [], existing_rows=..., schema=table.schema))


def _combine(table: ComparedTable, additions: list[alembic_ops.AddColumnOp], status: str | None) -> None:
    """Replace the columns that Alembic adds by one operation that asks for the status of existing rows."""
    if not additions:
        return
    columns = [op.column for op in additions]
    add = AddColumns(table.name, columns, status=status, existing_rows=..., schema=table.schema)
    first = table.modify_ops.ops.index(additions[0])
    table.modify_ops.ops = [op for op in table.modify_ops.ops if op not in additions]
    table.modify_ops.ops.insert(first, add)


def _rows_become_messages(diff: DiffContext, table: ComparedTable) -> bool:
    """Return whether all rows become jobs: the queue loses its status, or is new."""
    if diff.pending_condition(table):
        return True
    additions = (alembic_ops.AddColumnOp, alembic_ops.CreateIndexOp)
    return not diff.was_queue(table) and any(isinstance(op, additions) for op in table.modify_ops.ops)


def ask_in_downgrade(table: ComparedTable, condition: str) -> None:
    """Let the downgrade ask as well if it adds the status column again.

    :param condition: the condition under which a job is pending in the database, which names that column.
    """
    for number, op in enumerate(table.modify_ops.ops):
        if isinstance(op, alembic_ops.DropColumnOp) and _names(condition, op.column_name):
            name, schema = op.column_name, table.schema
            undo = AddColumns(table.name, [op.to_column()], status=name, existing_rows=..., schema=schema)
            table.modify_ops.ops[number] = ops.DropColumns(table.name, [name], schema=schema, undo=undo)


def _names(condition: str, column: str) -> bool:
    quoted = '"' + column.replace('"', '""') + '"'
    tokens = condition.replace("(", " ").replace(")", " ").split()
    return column in tokens or quoted in condition


def columns_of(index: sa.Index) -> list[Any]:
    return [part.name if isinstance(part, sa.Column) else sa.text(literal_sql(part)) for part in index.expressions]


def predicate_of(index: sa.Index) -> str | None:
    return _predicate_text(index.dialect_options["postgresql"]["where"])


def _predicate_text(where: Any) -> str | None:
    # A reflected predicate is a string, in which a colon is no parameter.
    return where if where is None or isinstance(where, str) else literal_sql(where)


def options_of(index: sa.Index) -> dict[str, Any]:
    return {
        name: [getattr(each, "name", each) for each in value] if isinstance(value, list | tuple) else value
        for name, value in index.dialect_kwargs.items()
        if name != "postgresql_where" and value
    }


# Below the logger of Alembic: by default, fileConfig() in env.py disables those that alembic.ini does not name.
log = logging.getLogger("alembic.autogenerate.sqlaqueue")


def keep_tables_with_schedules(diff: DiffContext) -> None:
    """Keep the tables of schedules while they have rows, and their functions."""

    def schema_of(table: ComparedTable) -> str | None:
        schema: str | None = diff.catalog.resolve(table.qualified_name)[0]
        return schema

    kept = leave_out_schedules(diff.context.connection, diff.upgrade, diff.tables, schema_of)
    kept_schemas = set(map(schema_of, kept))
    diff.tables = [table for table in diff.tables if table not in kept]
    # Named one by one: a function is kept even if its triggers were dropped by hand.
    diff.kept_functions |= {
        (schema, name)
        for schema, name in diff.catalog.functions
        if schema in kept_schemas and name.startswith(f"{SCHEDULE}_")
    }


def leave_out_schedules(
    connection: sa.Connection | None,
    upgrade: alembic_ops.UpgradeOps,
    tables: Sequence[ComparedTable],
    schema_of: Callable[[ComparedTable], str | None],
) -> list[ComparedTable]:
    """Drop no table of schedules that has rows, even if the models do not have it; return the tables that are kept.

    A MetaData gets them when a schedule is constructed. An ``env.py`` that imports the models, but not the module with
    the schedules, does not have them, so Alembic would drop them, with all schedules that were added at run time.
    """
    removed = [table for table in tables if table.model_table is None and table.name in {SCHEDULE, TICK}]
    schemas = {schema for schema in set(map(schema_of, removed)) if _has_schedules(connection, schema)}
    kept = [table for table in removed if schema_of(table) in schemas]
    if not kept:
        return []
    upgrade.ops[:] = [op for op in upgrade.ops if not any(table.is_dropped_by(op) for table in kept)]
    names = sorted(".".join(filter(None, table.qualified_name)) for table in kept)
    log.warning(
        "the tables %s are in no model, but are not dropped: there are schedules in them, and those that were added or "
        "changed at run time would be lost. Import the module that declares the schedules in env.py; or, if they are "
        "not needed any more, delete the rows of %s to have the tables dropped",
        ", ".join(names),
        SCHEDULE,
    )
    return kept


def _has_schedules(connection: sa.Connection | None, schema: str | None) -> bool:
    if connection is None or not sa.inspect(connection).has_table(SCHEDULE, schema=schema):
        return False
    rows = sa.exists(sa.select(sa.literal_column("1")).select_from(bare_table(SCHEDULE, schema)))
    # Alembic compares schemas by their real names.
    untranslated = {"schema_translate_map": None}
    return bool(connection.scalar(sa.select(rows), execution_options=untranslated))


def split_into_steps(diff: DiffContext) -> None:
    """Replace the operations on live tables by operations that do not block other transactions.

    An interrupted migration can be run again from its beginning.

    :raises CommandError: when ``-x live`` names no queue of the models.
    """
    live = [table for table, *_ in diff.remaining_tables if diff.is_live(table) and table.spec is not None]
    unknown = diff.live.difference(*(table.names for table in diff.tables if table.spec is not None))
    if unknown:
        names = ", ".join(sorted(unknown))
        raise CommandError(f"-x live={names}: no queue of the models has a table of that name; check the spelling")
    if not live:
        return
    for table in live:
        _refuse_indexes_of_partitioned_tables(diff, table)
        steps = _take_steps(table, is_queue=diff.was_queue(table))
        if diff.was_queue(table):
            # Before the rest, which stays one transaction: triggers must match the columns at any time.
            diff.before = [*steps, *diff.before]
        else:
            diff.after = [*steps, *diff.after]
            for op in diff.after:
                if isinstance(op, ops.CreateTriggers | ops.FillMessages) and op.table == table.name:
                    op.live = op.live or op.schema == table.schema
    for op in diff.upgrade.ops:
        _make_repeatable(op)


def _refuse_indexes_of_partitioned_tables(diff: DiffContext, table: ComparedTable) -> None:
    creations = (alembic_ops.CreateIndexOp, CreateUniqueIndex)
    indexes = [op for op in table.modify_ops.ops if isinstance(op, creations)]
    if indexes and diff.catalog.is_partitioned(table.qualified_name):
        raise CommandError(
            f"-x live={table.name}: the table is partitioned, and PostgreSQL cannot create an index on such a table "
            "CONCURRENTLY. Omit -x live, which blocks writes while the indexes are created; or use the strategy "
            '"delete_returning", whose index is on the message table'
        )


def _take_steps(table: ComparedTable, *, is_queue: bool) -> list[MigrateOperation]:
    """Remove the operations from a table's changes that can be steps of their own, and return these steps.

    :param is_queue: the table has triggers, which may need the columns that are dropped.
    """
    steps: list[MigrateOperation] = []
    remaining: list[MigrateOperation] = []
    added: list[sa.Column[object]] = []
    dropped: list[sa.Column[object]] = []
    needed = {name for op in table.modify_ops.ops for name in _indexed_columns(op)} if is_queue else set()
    for op in table.modify_ops.ops:
        if isinstance(op, AddColumns):
            op.live = True
            steps.insert(0, op)
        elif isinstance(op, alembic_ops.AddColumnOp) and (is_queue_column(op.column) or op.column.name in needed):
            added.append(op.column)
        elif isinstance(op, alembic_ops.DropColumnOp) and not is_queue:
            dropped.insert(0, op.to_column())
        elif isinstance(op, CreateUniqueIndex | ops.DropIndex):
            steps.append(op)
        elif isinstance(op, alembic_ops.CreateIndexOp):
            steps.append(_concurrent(op))
        elif isinstance(op, alembic_ops.DropIndexOp):
            undo = _concurrent(op.reverse())
            steps.append(ops.DropIndex(str(op.index_name), table.name, schema=table.schema, undo=undo))
        else:
            remaining.append(op)
    if added:
        steps.insert(0, AddColumns(table.name, added, schema=table.schema, live=True))
    if dropped:
        # Last: the expression for the status of existing rows may read them.
        steps.append(AddColumns(table.name, dropped, schema=table.schema, live=True).reverse())
    table.modify_ops.ops = remaining
    return steps


def _indexed_columns(op: MigrateOperation) -> set[str]:
    if isinstance(op, alembic_ops.CreateIndexOp):
        return {column.name for column in op.to_index().columns}
    return {each for each in op.columns if isinstance(each, str)} if isinstance(op, CreateUniqueIndex) else set()


def _concurrent(op: alembic_ops.CreateIndexOp) -> ops.CreateIndex:
    index = op.to_index()
    return ops.CreateIndex(
        str(index.name),
        op.table_name,
        columns_of(index),
        unique=bool(index.unique),
        where=predicate_of(index),
        options=options_of(index),
        schema=op.schema,
    )


def _make_repeatable(op: MigrateOperation) -> None:
    """Add IF EXISTS or IF NOT EXISTS, or let an operation replace its earlier result."""
    if isinstance(op, alembic_ops.CreateTableOp | alembic_ops.CreateIndexOp | alembic_ops.AddColumnOp):
        op.if_not_exists = True
    elif isinstance(
        op, alembic_ops.DropTableOp | alembic_ops.DropIndexOp | alembic_ops.DropColumnOp | alembic_ops.DropConstraintOp
    ):
        op.if_exists = True
    elif isinstance(op, CreateUniqueIndex):
        op.replace = True
    elif isinstance(op, alembic_ops.OpContainer):
        for each in op.ops:
            _make_repeatable(each)


def remove_drops_of_queue_objects(upgrade: alembic_ops.UpgradeOps) -> None:
    """Remove the operations by which alembic_utils drops triggers and functions of queues.

    alembic_utils drops all triggers and functions that are not registered with it. Those that queues no longer need are
    dropped by this plug-in.
    """
    upgrade.ops[:] = [op for op in upgrade.ops if not _drops_queue_object(op)]


def _drops_queue_object(op: MigrateOperation) -> bool:
    # Recognized by the names of its class and module, so that this plug-in does not depend on the other one.
    kind = type(op)
    if kind.__name__ != "DropOp" or kind.__module__.partition(".")[0] != "alembic_utils":
        return False
    # The name of a trigger, or of a function with its arguments.
    signature = str(getattr(getattr(op, "target", None), "signature", ""))
    return signature.lstrip('"').startswith(PREFIX)


def enums_are_managed_elsewhere() -> bool:
    """Return whether ``env.py`` uses alembic-postgresql-enum, which creates and drops the types of all columns.

    Its operations come after those of this plug-in, and fail if a type exists already or has been dropped.
    """
    return "alembic_postgresql_enum" in sys.modules


def leave_out_partitions(diff: DiffContext) -> None:
    """Compare no partition of a queue's table, and remove the operations that drop those which no model has.

    Alembic reads a partition as a table of its own. It would drop every one that the models lack, with all of its jobs,
    and the triggers of the queue, which a partition has because its parent has them, would be dropped before.
    """
    partitions = [table for table in diff.tables if _is_partition_of_queue(diff, table)]
    diff.tables = [table for table in diff.tables if table not in partitions]
    unknown = [table for table in partitions if table.model_table is None]
    diff.upgrade.ops[:] = [op for op in diff.upgrade.ops if not any(table.is_dropped_by(op) for table in unknown)]


def _is_partition_of_queue(diff: DiffContext, table: ComparedTable) -> bool:
    root = diff.catalog.root_of_partition(table.qualified_name)
    if root is None:
        return False
    for other in diff.tables:
        if diff.catalog.resolve(other.qualified_name) == root:
            return other.belongs_to_queue or diff.was_queue(other)
    # The filters of env.py leave the queue's table out, or its schema.
    return diff.catalog.is_queue(root)


_IS_NOT_NULL = re.compile(r'(?:"(?:[^"]|"")+"|\w+) IS NOT NULL')
"""How PostgreSQL prints the condition on the lease in the predicate of the index of quarantined jobs."""


def move_jobs(diff: DiffContext) -> None:
    """Keep the jobs of remaining tables pending under the other strategy, in both directions."""
    locked: list[ComparedTable] = []
    emptied: list[ops.PerDirection] = []
    for table, *_ in diff.remaining_tables:
        up: list[ops.QueueOp] = []
        down: list[ops.QueueOp] = []
        spec = table.spec
        released = None if spec is None else _release(table, spec, *_lease_conditions(diff, table, spec))
        rewritten = spec is not None and _message_columns_change(diff, table)
        # New triggers write messages for later changes only, so existing jobs need theirs from the migration.
        if spec is not None and (rewritten or any(map(table.has_message_triggers, diff.after))):
            up += _fill_messages(table, spec)
        if rewritten:
            empty = ops.EmptyMessages(diff.message_table_name(table)[1], schema=table.schema)
            diff.before.insert(0, ops.PerDirection([empty]))
            emptied.append(ops.PerDirection(down=[empty]))
        if rewritten or any(map(table.has_message_triggers, diff.before)):
            down += _fill_former_messages(diff, table)
        # Triggers that are created or dropped need a strong lock on the table.
        triggers_change = any(table.triggers_in(op) for op in [*diff.before, *diff.after])
        if diff.was_queue(table) and (up or down or released or triggers_change):
            locked.append(table)
        if released is not None:
            # In both directions before the columns are dropped that the conditions name.
            diff.before.insert(0, ops.PerDirection(released.ops))
            diff.last.append(ops.PerDirection(down=released.down))
        if down:
            diff.before.insert(0, ops.PerDirection(down=down))
        diff.after += up
    diff.after += emptied
    for schema in dict.fromkeys(table.schema for table in locked):
        _lock(diff, schema, [table for table in locked if table.schema == schema])


def move_waiting(diff: DiffContext) -> None:
    """Count what existing jobs wait for, where they begin to wait for others; and make them pending where they end.

    The trigger that counts runs when the migration's transaction commits.
    """
    for table, _, model in diff.remaining_tables:
        spec, name = table.spec, object_name("sqlaqueue_waits", table.name, "state")
        former = diff.catalog.function(table.qualified_name, f"{name}()")
        if spec is None or bool(spec.waits) == (former is not None):
            continue
        keys = [f"j.{NEUTRAL.identifier_preparer.quote(key.name)}" for key in spec.keys]
        jobs = NEUTRAL.identifier_preparer.format_table(model)
        changes = bare_table(object_name("sqlaqueue_waits", table.name), table.schema)
        status, pending = spec.columns["status"], literal_sql(spec.literal("pending"))
        waiting = literal_sql(spec.literal("waiting")) if spec.waits else _former_waiting(former, pending)
        text = NEUTRAL.identifier_preparer.quote(status.name)
        count = ops.ExecuteVerbatim(
            f"INSERT INTO {NEUTRAL.identifier_preparer.format_table(changes)} (relation, keys)\n"  # noqa: S608 - the names are quoted
            f"SELECT '', jsonb_agg(jsonb_build_array({', '.join(keys)}, 0, false))\n"
            f"FROM (SELECT *, row_number() OVER () / 10000 AS chunk FROM {jobs}\n"
            f"  WHERE {text} IN ({pending}, {waiting})) AS j GROUP BY j.chunk"
        )
        release = ops.ExecuteVerbatim(f"UPDATE {jobs} SET {text} = {pending} WHERE {text} = {waiting}")  # noqa: S608 - the names are quoted
        last, first = (count, release) if spec.waits else (release, count)
        diff.after.append(ops.PerDirection([last]))
        diff.before.insert(0, ops.PerDirection(down=[first]))


def _former_waiting(former: ReflectedFunction | None, pending: str) -> str:
    """Return the value of waiting jobs in the database, from the function that writes it."""
    values = re.findall(r" := ('.*?'|-?\d+);", "" if former is None else former.source)
    return next((each for each in values if each != pending), "'waiting'")


def _message_columns_change(diff: DiffContext, table: ComparedTable) -> bool:
    """Return whether the message table gets or loses columns, so that its rows must be written again."""
    columns = (alembic_ops.AddColumnOp, alembic_ops.DropColumnOp)
    messages = diff.message_table_name(table)
    return any(
        isinstance(op, columns)
        for other, *_ in diff.remaining_tables
        if other.qualified_name == messages
        for op in other.modify_ops.ops
    )


def _lease_conditions(diff: DiffContext, table: ComparedTable, spec: QueueSpec) -> tuple[str | None, str | None]:
    """Return the conditions that a running job has a lease, before the migration and after it.

    Both are None unless exactly one of the two strategies has leases. A processing row without a lease was not claimed
    by this queue.
    """
    before = _former_lease_condition(diff, table)
    role = next((role for role in ("lease_expires_at", "lease_token") if spec.has(role)), None)
    after = None if spec.strategy.holds_transaction or role is None else literal_sql(spec.columns[role].is_not(None))
    if not diff.was_queue(table) or (before is None) == (after is None):
        return None, None
    return before, after


def _former_lease_condition(diff: DiffContext, table: ComparedTable) -> str | None:
    """Return the condition that a job has a lease in the database, taken from its indexes on leases."""
    lease, quarantine = (object_name("ix", table.name, "queue", purpose) for purpose in ("lease", "quarantined"))
    if table.database_table is not None:
        for index in table.database_table.indexes:
            if index.name == lease and len(index.columns) == 1:
                return literal_sql(index.columns[0].is_not(None))
    _, predicate = diff.catalog.index(table.qualified_name, quarantine) or (True, None)
    match = _IS_NOT_NULL.search(predicate or "")
    return None if match is None else match[0]


def _release(table: ComparedTable, spec: QueueSpec, before: str | None, after: str | None) -> ops.PerDirection | None:
    """Return what releases jobs with leases in the direction in which the next strategy has no leases."""
    if not spec.has("status") or spec.config.states.processing is None or (before is None and after is None):
        return None
    values = {spec.columns["status"].name: literal_sql(spec.literal("pending"))}
    if spec.has("attempts"):
        attempts = spec.columns["attempts"]
        values[attempts.name] = literal_sql(sa.func.greatest(sa.func.coalesce(attempts, 0) - 1, 0))
    running = literal_sql(spec.in_state("processing"))

    releases = (
        []
        if lease is None
        else [ops.ReleaseJobs(table.name, values, where=f"{running} AND {lease}", schema=table.schema)]
        for lease in (before, after)
    )
    return ops.PerDirection(*releases)


def _fill_messages(table: ComparedTable, spec: QueueSpec) -> list[ops.QueueOp]:
    messages = spec.side_tables.get("messages")
    if messages is None or not messages.name.startswith(PREFIX):
        return []
    keys, order = [key.name for key in spec.keys], [spec.columns[role].name for role in spec.order_roles]
    where = literal_sql(spec.in_state("pending"))
    return [ops.FillMessages(table.name, messages.name, keys=keys, order=order, where=where, schema=table.schema)]


def _fill_former_messages(diff: DiffContext, table: ComparedTable) -> list[ops.QueueOp]:
    """Return what writes the messages of the former strategy, as its triggers in the database define them."""
    name = diff.message_table_name(table)
    messages, where = diff.database_table(name), diff.pending_condition_of_triggers(table)
    if messages is None or where is None:
        return []
    keys = [column.name for column in messages.columns if column.primary_key]
    order = [column.name for column in messages.columns if not column.primary_key]
    return [ops.FillMessages(table.name, name[1], keys=keys, order=order, where=where, schema=table.schema)]


def _lock(diff: DiffContext, schema: str | None, tables: Sequence[ComparedTable]) -> None:
    # All tables in one attempt: waiting for one while holding another would block other transactions.
    before, after = [], []
    for table in tables:
        messages = diff.message_table_name(table)
        remains = any(other.qualified_name == messages and other.model_table is not None for other in diff.tables)
        before += [table.name, *([messages[1]] if diff.database_table(messages) is not None else [])]
        after += [table.name, *([messages[1]] if remains else [])]
    up, down = (ops.LockTables(names, schema=schema) for names in (before, after))
    diff.before.insert(0, ops.PerDirection([up]))
    diff.last.append(ops.PerDirection(down=[down]))


def sort_dropped_columns(diff: DiffContext) -> None:
    """Drop the columns of a queue last first, so that the downgrade adds them in their present order.

    Alembic drops them in no particular order.
    """
    for table, database_table, _ in diff.remaining_tables:
        positions = {column.name: position for position, column in enumerate(database_table.columns)}
        drops = [op for op in table.modify_ops.ops if isinstance(op, alembic_ops.DropColumnOp)]
        if diff.was_queue(table) and len(drops) > 1:
            others = [op for op in table.modify_ops.ops if op not in drops]
            drops.sort(key=lambda op: positions[op.column_name], reverse=True)
            table.modify_ops.ops = [*others, *drops]


_NULLS = "postgresql_nulls_not_distinct"


def search_for_duplicates(diff: DiffContext) -> None:
    """Replace the operations on the unique indexes of tables that may have rows, in both directions.

    An index that is created and dropped is replaced by one operation, so that duplicates are found before it is
    dropped.
    """
    for table, database_table, _ in diff.remaining_tables:
        live = diff.is_live(table) and table.spec is not None
        create, drop = _find(table, alembic_ops.CreateIndexOp), _find(table, alembic_ops.DropIndexOp)
        former = None
        if isinstance(drop, alembic_ops.DropIndexOp) and drop.to_index().unique:
            keys = [column.name for column in database_table.primary_key]
            former = _create(table, drop.reverse(), keys, live=live)
        if isinstance(create, alembic_ops.CreateIndexOp) and table.spec is not None:
            new = _create(table, create, [column.name for column in table.spec.keys], live=live)
            new.former, new.replace = former, former is not None
            _replace(table, create, new)
            if former is not None:
                _replace(table, drop)
        elif former is not None:
            _replace(table, drop, _drop(former))


def _find(table: ComparedTable, kind: type[MigrateOperation]) -> MigrateOperation | None:
    found = (op for op in table.modify_ops.ops if isinstance(op, kind))
    return next((op for op in found if str(getattr(op, "index_name", "")) == table.unique_index), None)


def _create(
    table: ComparedTable, op: alembic_ops.CreateIndexOp, keys: Sequence[str], *, live: bool
) -> CreateUniqueIndex:
    index = op.to_index()
    return CreateUniqueIndex(
        table.unique_index,
        table.name,
        columns_of(index),
        where=predicate_of(index),
        # A table without a primary key has the address of each row.
        keys=[*keys] or ["ctid"],
        nulls_distinct=not index.dialect_kwargs.get(_NULLS),
        options={name: value for name, value in options_of(index).items() if name != _NULLS},
        schema=table.schema,
        live=live,
    )


def _drop(former: CreateUniqueIndex) -> MigrateOperation:
    if former.live:
        return former.reverse()
    return ops.PerDirection([former.reverse()], down=[former])


def _replace(table: ComparedTable, old: MigrateOperation | None, *new: MigrateOperation) -> None:
    table.modify_ops.ops = [each for op in table.modify_ops.ops for each in (new if op is old else (op,))]
