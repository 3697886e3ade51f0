"""The SQL of a queue's database objects.

The dialect's own preparer writes the names, so that quoting and ``schema_translate_map`` work as for tables.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import DDLCompiler

from sqlaqueue.postgresql.ddl.objects import (
    CommentOnFunction,
    DropFunction,
    Function,
    SecureFunction,
    StorageParameters,
    Trigger,
)
from sqlaqueue.postgresql.function_calls import qualified_name


def escaped(compiler: DDLCompiler, text: str) -> str:
    """Return SQL with its percent signs doubled where the driver requires it."""
    return compiler.sql_compiler.process(sa.literal_column(text))


def _qualified(compiler: DDLCompiler, function: Function) -> str:
    return qualified_name(compiler.preparer, function.name, function.table.schema)


def _signature(compiler: DDLCompiler, function: Function) -> str:
    return f"{_qualified(compiler, function)}({function.arguments})"


@compiles(Function, "postgresql")
def _create_function(element: Function, compiler: DDLCompiler, **_: Any) -> str:
    body = escaped(compiler, element.body)
    for key, table in element.tables.items():
        body = body.replace(f"{{{key}}}", compiler.preparer.format_table(table))
    path = "SET search_path FROM CURRENT " if element.sets_search_path else ""
    # Each query of a function that claims call is planned once. Since the planner cannot know the value of a LIMIT, it
    # would find a plan for the values of each call cheaper, and plan each call, which takes longer than the query.
    plan = "" if element.returns == "trigger" else "SET plan_cache_mode = force_generic_plan "
    return (
        f"CREATE OR REPLACE FUNCTION {_signature(compiler, element)} RETURNS {element.returns}\n"
        f"LANGUAGE plpgsql {path}SET enable_seqscan = off {plan}"
        f"AS $sqlaqueue$\n{body}$sqlaqueue$"
    )


@compiles(SecureFunction, "postgresql")
def _secure_function(element: SecureFunction, compiler: DDLCompiler, **_: Any) -> str:
    function = _signature(compiler, element.function)
    # Dollar-quoted: the name may contain a quote, and its schema is inserted later. PostgreSQL does not look up a
    # signature with the names of arguments.
    oid = f"to_regprocedure($name${function}$name$)"
    if element.function.arguments:
        oid = f"to_regproc($name${_qualified(compiler, element.function)}$name$)"
    in_schema = (
        "SELECT quote_ident(n.nspname) FROM pg_proc AS f JOIN pg_namespace AS n ON n.oid = f.pronamespace\n"  # noqa: S608 - the preparer has quoted it
        f"    WHERE f.oid = {oid}"
    )
    return (
        f"DO $sqlaqueue$\nBEGIN\n  REVOKE ALL ON FUNCTION {function} FROM PUBLIC;\n"
        f"  EXECUTE $alter$ALTER FUNCTION {function} SECURITY DEFINER SET search_path = pg_catalog, $alter$ ||\n"
        f"    ({in_schema}) || ', pg_temp';\nEND\n$sqlaqueue$"
    )


@compiles(CommentOnFunction, "postgresql")
def _comment_on_function(element: CommentOnFunction, compiler: DDLCompiler, **_: Any) -> str:
    function, comment = element.function, "NULL"
    if function.comment is not None:
        comment = compiler.sql_compiler.process(sa.literal(function.comment, sa.Text()), literal_binds=True)
    return f"COMMENT ON FUNCTION {_signature(compiler, function)} IS {comment}"


@compiles(DropFunction, "postgresql")
def _drop_function(element: DropFunction, compiler: DDLCompiler, **_: Any) -> str:
    return f"DROP FUNCTION IF EXISTS {_signature(compiler, element.function)}"


@compiles(Trigger, "postgresql")
def _create_trigger(element: Trigger, compiler: DDLCompiler, **_: Any) -> str:
    rows = "".join(f"{which} TABLE AS {name} " for which, name in element.rows.items())
    create = "CREATE OR REPLACE TRIGGER" if element.replace else "CREATE TRIGGER"
    each = "STATEMENT" if element.when is None else f"ROW WHEN ({escaped(compiler, element.when)})"
    return (
        f"{create} {compiler.preparer.quote(element.name)} AFTER {element.event} "
        f"ON {compiler.preparer.format_table(element.table)} {f'REFERENCING {rows}' if rows else ''}"
        f"FOR EACH {each} EXECUTE FUNCTION {_signature(compiler, element.function)}"
    )


@compiles(StorageParameters, "postgresql")
def _set_parameters(element: StorageParameters, compiler: DDLCompiler, **_: Any) -> str:
    settings = ", ".join(f"{name} = {value}" for name, value in element.parameters.items())
    return f"ALTER TABLE {compiler.preparer.format_table(element.table)} SET ({settings})"
