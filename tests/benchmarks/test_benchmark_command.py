"""`sqlaqueue bench` runs in the user's database, and leaves it unchanged."""

import json
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from sqlaqueue.benchmark import BenchmarkError, run_benchmark, shape_of
from sqlaqueue.cli.bench import bench
from sqlaqueue.exc import ConfigurationError, NotAQueueError
from sqlaqueue.mapping.mixin import spec_of
from tests.benchmarks import models_to_copy
from tests.servers import Database, Server

MODULE = "tests.benchmarks.models_to_copy"


def contents(database: Database) -> Any:
    """Return the contents of a database: schemas, tables, types, functions, sequences and numbers of writes."""
    statement = """
        SELECT 'schema', nspname, '' FROM pg_namespace WHERE nspname !~ '^pg_'
        UNION ALL SELECT 'table', relname, relkind::text FROM pg_class WHERE relnamespace = 'public'::regnamespace
        UNION ALL SELECT 'type', typname, typtype::text FROM pg_type WHERE typnamespace = 'public'::regnamespace
        UNION ALL SELECT 'function', proname, '' FROM pg_proc WHERE pronamespace = 'public'::regnamespace
        UNION ALL SELECT 'sequence', sequencename, last_value::text FROM pg_sequences
        UNION ALL SELECT 'rows', relname, (n_tup_ins + n_tup_upd + n_tup_del)::text FROM pg_stat_user_tables
        ORDER BY 1, 2, 3
    """
    with database.connect() as connection:
        return connection.execute(statement).fetchall()


def test_the_database_is_unchanged(database: Database) -> None:
    engine = sa.create_engine(database.url())
    models_to_copy.Base.metadata.create_all(engine)
    engine.dispose()
    before = contents(database)
    result = run_benchmark(database.url(), f"{MODULE}:Email", jobs=120, batch_size=50, singles=3)
    assert contents(database) == before
    assert (result.strategy, result.jobs, len(result.picked_up)) == ("delete_returning", 120, 3)
    assert min(result.enqueued_per_second, result.done_per_second, *result.picked_up) > 0
    assert result.picked_up_within(0.5) == result.picked_up[1]


@pytest.mark.thorough
def test_an_empty_database_is_enough(database: Database) -> None:
    before = contents(database)
    result = CliRunner().invoke(
        bench, ["--url", database.url(), "--jobs", "100", "--singles", "3", "--strategy", "batch_select", "--json"]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["strategy"] == "batch_select"
    assert contents(database) == before


@pytest.mark.once
def test_an_engine_is_refused(server: Server) -> None:
    engine: Any = sa.create_engine(server.url())
    with pytest.raises(ConfigurationError, match=r"run_benchmark\(url=...\).* not of type Engine; .*render_as_string"):
        run_benchmark(engine)


@pytest.mark.thorough
def test_the_schema_is_dropped_when_a_worker_fails(database: Database) -> None:
    before = contents(database)
    with pytest.raises(BenchmarkError, match="a worker process failed"):
        run_benchmark(database.url(), f"{MODULE}:FragileInParent", jobs=100)
    assert contents(database) == before


@pytest.mark.once
def test_a_copy_refers_to_nothing_of_the_original() -> None:
    shape = shape_of(models_to_copy.Email)
    spec = spec_of(shape.model("elsewhere"))
    table, original = spec.table, spec_of(models_to_copy.Email).table
    assert len(table.columns) == len(original.columns)
    assert {each.schema for each in table.metadata.tables.values()} == {"elsewhere"}
    assert not table.foreign_keys
    assert spec.config.on_complete == "delete"
    assert not spec.has("last_error")
    assert {"email", "email_code"}.isdisjoint({table.name, *(index.name for index in table.indexes)})
    assert spec.name != spec_of(models_to_copy.Email).name


@pytest.mark.once
def test_the_keys_of_a_copy_are_unique() -> None:
    rows = list(shape_of(models_to_copy.Pair).rows(3, first=7))
    assert [next(iter(row.values())) for row in rows] == [7, 8, 9]
    assert len({tuple(row.values()) for row in rows}) == 3


@pytest.mark.once
@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (models_to_copy.Host, ConfigurationError, "Host: the column address is not nullable"),
        (models_to_copy.Customer, NotAQueueError, "Customer is not a queue"),
    ],
)
def test_a_model_that_cannot_be_copied_is_an_error(model: type[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        shape_of(model)


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "nonsense"], "give a URL such as postgresql://"),
        (["--url", "sqlite://"], "is not supported"),
        (["--url", "postgresql+asyncpg://localhost/app"], "with a synchronous driver"),
        (["--url", "postgresql+pg8000://localhost/app"], "its driver pg8000 is not installed"),
        (["Email", "--url", "postgresql://localhost/app"], "give a queue class as package.module:Class"),
        (["missing.module:Email", "--url", "postgresql://localhost/app"], "there is no module missing"),
        ([f"{MODULE}:Missing", "--url", "postgresql://localhost/app"], "has no Missing"),
        ([f"{MODULE}:Customer", "--url", "postgresql://localhost/app"], "Customer is not a queue"),
        (["--url", "postgresql://localhost:1/app"], "Connection refused"),
    ],
)
def test_input_errors_are_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code in {1, 2}
    assert message in result.output.replace("\n", " ")
