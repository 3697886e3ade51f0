"""Which engines, keys and tests the default session runs."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENGINES = sorted(path.stem.removeprefix("test_") for path in HERE.glob("test_*.py") if path.stem != "test_engines_page")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files of engines that ``--engines`` does not name."""
    name = collection_path.stem.removeprefix("test_")
    return True if name in ENGINES and name not in chosen_engines(config) else None


def chosen_engines(config: pytest.Config) -> list[str]:
    """Return the engines that ``--engines`` names; all without it."""
    option = config.getoption("--engines")
    names = str(option).split(",") if option else ENGINES
    if unknown := set(names) - set(ENGINES):
        msg = f"--engines={option}: there are {', '.join(ENGINES)}, not {', '.join(sorted(unknown))}"
        raise pytest.UsageError(msg)
    return names


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run composite keys for one strategy only; for the others, only the tests of query plans.

    Strategies share the code for composite keys, and the thorough session tests all of them. The same holds for rows
    that are their own message, which share most statements with other strategies.
    """
    for item in items:
        if HERE not in item.path.parents or "under_every_plan" in item.name:
            continue
        composite, own = "composite-key" in item.name, "TestRowsThatAreTheirOwnMessage" in item.nodeid
        is_server = "test_mariadb" in item.nodeid
        if (composite and ("TestUpdateStatus" not in item.nodeid or is_server)) or (
            own and zlib.crc32(item.nodeid.encode()) % 3
        ):
            item.add_marker(pytest.mark.thorough)
        elif composite:
            item.add_marker(pytest.mark.once)
