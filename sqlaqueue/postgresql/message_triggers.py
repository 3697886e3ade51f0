"""The triggers that keep a message table in step with its job table.

Statement triggers with transition tables: they see INSERT .. SELECT, ON CONFLICT, COPY, MERGE and plain UPDATE,
at one call a statement. PL/pgSQL keeps the plan that it made for the first call, when there may have been one message,
and a join chosen for that would be quadratic for ten thousand. So old and new rows are compared by EXCEPT, which hashes
or sorts, and messages are found by a list of keys, in their index. Keys of several columns have no such list: these are
joined, with a new plan for each call.

The function runs with the rights of its owner, so that whoever writes jobs needs none on the messages. Nothing in its
text may therefore mean something else to somebody who can create objects in a schema of the search path: tables
are found in their own schema, and operators are those of PostgreSQL.
"""

from __future__ import annotations

import sqlalchemy as sa

from sqlaqueue.postgresql.ddl import NEUTRAL, QueueObject, Trigger, TriggerFunction, equals, plain_type, version_comment
from sqlaqueue.postgresql.identifiers import object_name
from sqlaqueue.queue.roles import literal_text
from sqlaqueue.queue.spec import QueueSpec

VERSION = 3
"""To be raised whenever the text below changes: running consumers tell an older function by it."""


def message_triggers(spec: QueueSpec, messages: sa.Table) -> list[QueueObject]:
    """Return the trigger function and its triggers, in the order of their creation."""
    function = TriggerFunction(
        spec.table,
        object_name("sqlaqueue_message", spec.table.name, "sync"),
        _body(spec),
        {"messages": messages},
        version_comment(VERSION),
        definer=True,
    )
    rows = {
        "INSERT": {"NEW": "new_rows"},
        "UPDATE": {"OLD": "old_rows", "NEW": "new_rows"},
        "DELETE": {"OLD": "old_rows"},
        "TRUNCATE": {},
    }
    triggers = (
        Trigger(spec.table, f"sqlaqueue_message_{event.lower()}", event, function, tables)
        for event, tables in rows.items()
    )
    objects: list[QueueObject] = [function, *triggers]
    return objects


def _body(spec: QueueSpec) -> str:
    preparer, status = NEUTRAL.identifier_preparer, spec.columns["status"]
    keys = [preparer.quote(key.name) for key in spec.keys]
    order = [preparer.quote(spec.columns[role].name) for role in spec.order_roles]
    columns, key_list = ", ".join([*keys, *order]), ", ".join(keys)
    waiting = (
        f"{preparer.quote(status.name)} {equals(status)} {literal_text(spec.status_value('pending'), status.type)}"
    )
    update = f"DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in order)}" if order else "DO NOTHING"
    gone = f"""\
SELECT {key_list} FROM old_rows WHERE {waiting}
           EXCEPT SELECT {key_list} FROM new_rows WHERE {waiting}"""  # noqa: S608 - as below
    # Else a column called "found" would be ambiguous: PL/pgSQL has a variable of that name.
    return f"""\
#variable_conflict use_column
BEGIN
  IF TG_OP = 'TRUNCATE' THEN
    DELETE FROM {{messages}};
    RETURN NULL;
  END IF;
  IF TG_OP = 'INSERT' THEN
    INSERT INTO {{messages}} ({columns})
      SELECT {columns} FROM new_rows WHERE {waiting}
      ON CONFLICT ({key_list}) {update};
    RETURN NULL;
  END IF;
  IF TG_OP = 'DELETE' THEN
    {_delete(spec, f"SELECT {key_list} FROM old_rows")}
    RETURN NULL;
  END IF;
  {_delete(spec, gone)}
  INSERT INTO {{messages}} ({columns})
    SELECT {columns} FROM new_rows WHERE {waiting}
    EXCEPT SELECT {columns} FROM old_rows WHERE {waiting}
    ON CONFLICT ({key_list}) {update};
  RETURN NULL;
END
"""  # noqa: S608 - the names are quoted, and the one value is written as a literal


def _delete(spec: QueueSpec, gone: str) -> str:
    """Return the statement that deletes the messages whose keys a query returns."""
    keys = [(NEUTRAL.identifier_preparer.quote(key.name), key) for key in spec.keys]
    name, key = keys[0]
    if len(keys) == 1 and not isinstance(plain_type(key), sa.ARRAY):
        return f"DELETE FROM {{messages}} WHERE {name} {equals(key)} ANY (ARRAY({gone}));"  # noqa: S608 - as above
    same_key = " AND ".join(f"m.{name} {equals(key)} gone.{name}" for name, key in keys)
    return (
        f"EXECUTE $delete$DELETE FROM {{messages}} AS m\n"  # noqa: S608 - as above
        f"    USING ({gone}) AS gone WHERE {same_key}$delete$;"
    )
