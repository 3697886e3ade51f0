"""A cluster and a schema for each test; without a cluster the tests are skipped."""

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.citus.cluster import CitusDatabase, Cluster, running

NO_CLUSTER = (
    "needs Citus: pass --citus BIN_DIR, the programs of a PostgreSQL with Citus, or --citus URL, a database of a "
    "cluster, or set SQLAQUEUE_CITUS_URL; docs/evidence/engines.md says how to build it"
)


class SkippedModule(pytest.Module):
    """A module that is not imported, as there is no cluster."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip(NO_CLUSTER, allow_module_level=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip each file as a whole, so that the reason is printed once for each."""
    if Path(__file__).parent in module_path.parents and not place_of(parent.config):
        return SkippedModule.from_parent(parent, path=module_path)
    return None


def place_of(config: pytest.Config) -> str | None:
    """Return the URL of a cluster, or the directory with the programs; None without Citus."""
    return config.getoption("--citus") or os.environ.get("SQLAQUEUE_CITUS_URL")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "placement" in metafunc.fixturenames:
        metafunc.parametrize("placement", ["schema", "distributed"])


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config) -> Iterator[Cluster | None]:
    """The cluster that this session has started; None where a URL names one."""
    place = str(place_of(pytestconfig))
    if "://" in place:
        yield None
        return
    with running(Path(place)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def citus_database(pytestconfig: pytest.Config, cluster: Cluster | None) -> Iterator[CitusDatabase]:
    """A database with Citus; of the one that a URL names, only schemas of the tests' own are used."""
    if cluster is None:
        yield CitusDatabase.of_url(str(place_of(pytestconfig)))
        return
    with cluster.database() as database:
        yield database


@pytest.fixture
def own_cluster(cluster: Cluster | None) -> Cluster:
    """The cluster of this session, whose servers a test may kill."""
    if cluster is None:
        pytest.skip("kills a server, so it needs --citus BIN_DIR")
    return cluster


@contextlib.contextmanager
def schema_in(database: CitusDatabase, *, sharded: bool) -> Iterator[CitusDatabase]:
    """Create a schema, which Citus places on one worker if it is ``sharded``; in the end drop it with its tables."""
    name = f"sqlaqueue_test_{secrets.token_hex(4)}"
    with database.connect() as connection:
        connection.execute(f"SET citus.enable_schema_based_sharding = {'on' if sharded else 'off'}".encode())
        connection.execute(f"CREATE SCHEMA {name}".encode())
    try:
        yield database.in_schema(name)
    finally:
        with database.connect() as connection:
            connection.execute(f"DROP SCHEMA {name} CASCADE".encode())


@pytest.fixture
def schema(citus_database: CitusDatabase) -> Iterator[CitusDatabase]:
    """The database with a schema for local, reference and distributed tables."""
    with schema_in(citus_database, sharded=False) as database:
        yield database


@pytest.fixture
def sharded_schema(citus_database: CitusDatabase) -> Iterator[CitusDatabase]:
    """The database with a schema whose tables are on one worker."""
    with schema_in(citus_database, sharded=True) as database:
        yield database


@contextlib.contextmanager
def engine_of(database: CitusDatabase) -> Iterator[sa.Engine]:
    engine = sa.create_engine(database.url(), pool_size=12)
    yield engine
    engine.dispose()


@pytest.fixture
def engine(schema: CitusDatabase) -> Iterator[sa.Engine]:
    with engine_of(schema) as engine:
        yield engine


@pytest.fixture
def sharded_engine(sharded_schema: CitusDatabase) -> Iterator[sa.Engine]:
    with engine_of(sharded_schema) as engine:
        yield engine
