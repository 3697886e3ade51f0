"""Scenes for the scenarios, and the seed from which all that is random in them follows."""

from __future__ import annotations

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
from tests.faults.scene import Scene
from tests.faults.zygote import Zygote
from tests.servers import Server, Servers

SEED = pytest.StashKey[int]()

MakeScene = Callable[..., AbstractContextManager[Scene]]


def seed_of(config: pytest.Config) -> int:
    """Return the seed of this session: the one that was asked for, or any."""
    if SEED not in config.stash:
        asked = config.getoption("--seed")
        config.stash[SEED] = random.SystemRandom().randrange(10**6) if asked is None else int(asked)
    return config.stash[SEED]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        report.sections.append(("seed", f"to play it again: --seed {seed_of(item.config)}"))
    return report


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with Zygote() as zygote:
        yield zygote


class Stage:
    """Queues on the server that all tests share, and on one that may be crashed, started when it is needed."""

    def __init__(self, server: Server, servers: Servers) -> None:
        self._server, self._servers, self._stack = server, servers, contextlib.ExitStack()
        self._supplies: dict[bool, Supply] = {}

    def take(self, strategy: str, colour: str, *, crash: bool) -> Bench:
        if crash not in self._supplies:
            own = self._servers.own(self._server.version)
            supply = Supply(self._stack.enter_context(own) if crash else self._server)
            self._stack.callback(supply.close)
            self._supplies[crash] = supply
        return self._supplies[crash].take(strategy, colour)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="session")
def stage(pytestconfig: pytest.Config, server: Server) -> Iterator[Stage]:
    stage = Stage(server, pytestconfig.stash[SERVERS])
    yield stage
    stage.close()


@pytest.fixture
def make_scene(
    request: pytest.FixtureRequest, pytestconfig: pytest.Config, stage: Stage, zygote: Zygote, tmp_path: Path
) -> MakeScene:
    """Return what makes a scene of a strategy and a colour; ``crash`` says that its server will be restarted."""

    def make(strategy: str, colour: str, *, crash: bool = False, **options: Any) -> AbstractContextManager[Scene]:
        bench = stage.take(strategy, colour, crash=crash)
        # By the test's name, so that it plays the same way alone and among all.
        dice = random.Random(f"{seed_of(pytestconfig)} {request.node.name}")
        return Scene(bench, zygote, tmp_path, dice, **options).playing()

    return make
