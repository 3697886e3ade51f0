"""For every kind of model, a migration makes the same schema as create_all(), and its downgrade removes it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from sqlaqueue import QueueConfig
from tests.mapping.conftest import Built
from tests.mapping.kinds import KINDS
from tests.migrations.project import Project, dump

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.mapping.conftest import TidyDatabase
    from tests.servers import Database

SAME_TABLE_AS_PLAIN = {
    "abstract_base",
    "base_before_mixin",
    "dataclass",
    "dataclass_for_one_model",
    "dataclass_with_abstract_base",
    "decorated",
    "decorated_dataclass",
    "old_declarative_base",
    "queue_in_base",
    "unmapped_mixin",
    "without_metaclass",
}


def cells() -> Iterator[Any]:
    """Yield each kind of model with each of its strategies.

    All but one strategy of a kind are thorough tests, and so are mappings that make the same table as the plain one.
    """
    for row, (name, kind) in enumerate(KINDS.items()):
        for number, strategy in enumerate(kind.strategies):
            alike = name in SAME_TABLE_AS_PLAIN or row % len(kind.strategies) != number
            marks = (pytest.mark.thorough,) if alike else ()
            yield pytest.param(name, strategy, id=f"{name}-{strategy}", marks=marks)


@pytest.mark.parametrize(("name", "strategy"), [*cells()])
def test_a_migration_makes_the_schema_of_create_all(
    tidy: TidyDatabase, tmp_path: Path, name: str, strategy: str
) -> None:
    built = KINDS[name].build(functools.partial(QueueConfig, strategy=strategy))
    models = project_for(built, tmp_path, tidy.database)
    if built.options:
        write_migration_without_translation(built, models, tidy)
    with tidy.schemas(*built.schemas):
        before = without_models(tidy.database, built.schemas)
        wanted = created_by_create_all(built, tidy)
        assert wanted != before
        models.execution_options = built.options
        if not built.options:
            models.revise()
        models.upgrade()
        assert dump(tidy.database) == wanted
        if not built.options:
            models.check()
        models.downgrade()
        assert dump(tidy.database) == before
        tidy.connection.execute("DROP TABLE IF EXISTS alembic_version")


@functools.cache
def without_models(database: Database, schemas: tuple[str, ...]) -> str:
    """Return the dump of a database whose schemas are empty."""
    return dump(database)


def project_for(built: Built, directory: Path, database: Database) -> Project:
    def include_name(name: str | None, kind: str, _: Any) -> bool:
        # As in most projects, the partitions are not in the MetaData.
        return kind != "table" or not (name or "").startswith("part")

    project = Project(directory=directory, database=database, metadata=built.metadata)
    project.options = {"include_schemas": bool(built.schemas), "include_name": include_name}
    if "part" in built.metadata.tables:
        del project.options["include_name"]
    return project


def created_by_create_all(built: Built, tidy: TidyDatabase) -> str:
    engine = sa.create_engine(tidy.database.url(), execution_options=built.options)
    built.metadata.create_all(engine)
    # Partitions are created by the application's own migrations.
    for number in range(2):
        if built.table.dialect_options["postgresql"]["partition_by"]:
            tidy.connection.execute(f"DROP TABLE part{number}")
    schema = dump(tidy.database)
    built.metadata.drop_all(engine)
    engine.dispose()
    return schema


def write_migration_without_translation(built: Built, models: Project, tidy: TidyDatabase) -> None:
    """Write the migration in schemas with the names of the models: autogenerate does not translate names."""
    names = [name for name in built.options["schema_translate_map"] if name]
    with tidy.schemas(*names):
        models.options["include_schemas"] = bool(names)
        models.revise()
        models.upgrade()
        models.check()
        models.downgrade()
        tidy.connection.execute("DROP TABLE alembic_version")
        # Otherwise Alembic writes its version to the translated schema, and looks for it in the default one.
        models.options["version_table_schema"] = "public"
