"""Fixtures of the fault scenarios, and the seed of their random choices."""

import contextlib
import random
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SERVERS
from tests.consumer.bench import Bench
from tests.consumer.conftest import Supply
from tests.faults.harness import Harness
from tests.servers import Server, Servers

SEED = pytest.StashKey[int]()

MakeHarness = Callable[..., AbstractContextManager[Harness]]


def seed_of(config: pytest.Config) -> int:
    """Return the seed of this test session: the value of ``--seed``, or a random number."""
    if SEED not in config.stash:
        option = config.getoption("--seed")
        config.stash[SEED] = random.SystemRandom().randrange(10**6) if option is None else int(option)
    return config.stash[SEED]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """The random choices of the test, which do not depend on those of other tests."""
    return random.Random(f"{seed_of(request.config)} {request.node.name}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        report.sections.append(("seed", f"to repeat this test: --seed {seed_of(item.config)}"))
    return report


class Benches:
    """Queues on the server that all tests share, and on a second server, which tests may crash.

    The second server is started when it is first used.
    """

    def __init__(self, server: Server, servers: Servers) -> None:
        self._server, self._servers, self._stack = server, servers, contextlib.ExitStack()
        self._supplies: dict[bool, Supply] = {}

    def take(self, strategy: str, api: str, *, own_server: bool) -> Bench:
        if own_server not in self._supplies:
            second = self._servers.own(self._server.version)
            supply = Supply(self._stack.enter_context(second) if own_server else self._server)
            self._stack.callback(supply.close)
            self._supplies[own_server] = supply
        return self._supplies[own_server].take(strategy, api)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="session")
def benches(pytestconfig: pytest.Config, server: Server) -> Iterator[Benches]:
    benches = Benches(server, pytestconfig.stash[SERVERS])
    yield benches
    benches.close()


@pytest.fixture
def make_harness(benches: Benches, tmp_path: Path, rng: random.Random) -> MakeHarness:
    """Return a function that makes a harness for a strategy and an API, ``sync`` or ``async``.

    A test that crashes the server passes ``own_server=True``.
    """

    def make(strategy: str, api: str, *, own_server: bool = False, **options: Any) -> Harness:
        return Harness(benches.take(strategy, api, own_server=own_server), tmp_path, rng, **options)

    return make
