"""The SQL that a recipe shows is the SQL that its model needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.recipes.recipe_page import ROOT, Recipe

if TYPE_CHECKING:
    from tests.recipes.conftest import ExistingSystem
    from tests.servers import Database, Server

    MakeSystem = Callable[..., ExistingSystem]

RECIPES = ["message-table", "rows-as-messages", "status-column", "worker-script"]

OBJECTS = """
    SELECT 'column', c.oid::regclass::text, attname::text, format_type(atttypid, atttypmod), attnotnull,
        pg_get_expr(adbin, adrelid)
    FROM pg_class AS c JOIN pg_attribute ON attrelid = c.oid LEFT JOIN pg_attrdef ON adrelid = c.oid AND adnum = attnum
    WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' AND attnum > 0 AND relname <> 'effect'
    UNION ALL
    SELECT 'index', tablename, indexname, indexdef, NULL, NULL FROM pg_indexes WHERE schemaname = 'public'
    UNION ALL
    SELECT 'trigger', tgrelid::regclass::text, tgname, NULL, NULL, NULL FROM pg_trigger
"""


def objects(database: Database) -> set[Any]:
    with database.connect() as connection:
        return set(connection.execute(OBJECTS).fetchall())


@pytest.mark.once
@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_adds_what_the_model_needs(
    make_system: MakeSystem, name: str, database: Database, server: Server
) -> None:
    make_system(name)
    with server.database() as fresh:
        program = Recipe(name).program(fresh.url())
        program.Base.metadata.create_all(program.engine)
        program.engine.dispose()
        assert objects(fresh) == objects(database)


@pytest.mark.once
def test_no_recipe_is_forgotten() -> None:
    pages = {page.stem for page in (ROOT / "docs" / "recipes").glob("*.md")}
    assert pages == {*RECIPES, "errors-and-logs", "run-later", "web-servers"}
