"""The triggers that keep a message table in step with its job table.

They fire once a statement, with transition tables, so they see INSERT .. SELECT, ON CONFLICT, COPY, MERGE and plain
UPDATE. PL/pgSQL keeps the plan of the first call, when there may have been one message; a join in that plan would be
quadratic for ten thousand. So old and new rows are compared by EXCEPT, which hashes or sorts, and messages are looked
up by an array of keys, in their index. Composite keys have no such array: they are joined, planned anew in each call.

The function runs with its owner's privileges, so that a writer of jobs needs none on the messages. No name in it may
depend on the search path, into which others may put objects: tables carry their schema, operators are PostgreSQL's.
"""

from __future__ import annotations

import sqlalchemy as sa

from sqlaqueue.postgresql.ddl.attach import attach
from sqlaqueue.postgresql.ddl.objects import StorageParameters, Trigger, TriggerFunction, version_comment
from sqlaqueue.postgresql.identifiers import object_name
from sqlaqueue.postgresql.types import NEUTRAL, equals, plain_type
from sqlaqueue.queue.roles import literal_text
from sqlaqueue.queue.spec import QueueSpec

VERSION = 3
"""Raise it whenever the text below changes: a running Consumer compares it with the version in the database."""


def attach_message_triggers(spec: QueueSpec, messages: sa.Table) -> None:
    """Attach the trigger function and its triggers to the queue's table, and storage parameters to the messages."""
    attach(messages, StorageParameters(messages))
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
    attach(spec.table, function)
    for event, tables in rows.items():
        attach(spec.table, Trigger(spec.table, f"sqlaqueue_message_{event.lower()}", event, function, tables))


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
    # Without the first line a column called "found" would be ambiguous: PL/pgSQL has a variable of that name.
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
