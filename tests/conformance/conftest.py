"""Which engines, keys and tests the default session runs."""

import zlib

import pytest

from sqlaqueue.testing.conformance.engines import ENGINES

HERE = "tests/conformance/"
TITLES = {each.dialect: each.title for each in ENGINES}


def chosen_engines(config: pytest.Config) -> list[str]:
    """Return the engines that ``--engines`` names, as the names of the classes end; all without it."""
    option = config.getoption("--engines")
    names = str(option).split(",") if option else list(TITLES)
    if unknown := set(names) - set(TITLES):
        msg = f"--engines={option}: there are {', '.join(sorted(TITLES))}, not {', '.join(sorted(unknown))}"
        raise pytest.UsageError(msg)
    return [TITLES[name] for name in names]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run composite keys for one strategy only; for the others, only the tests of query plans.

    Strategies share the code for composite keys, and the thorough session tests all of them. The same holds for rows
    that are their own message, which share most statements with other strategies.
    """
    chosen = tuple(f"On{title}" for title in chosen_engines(config))
    own_items = [item for item in items if item.nodeid.startswith(HERE) and isinstance(item.parent, pytest.Class)]
    left_out = {item for item in own_items if item.parent and not item.parent.name.endswith(chosen)}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]
    for item in own_items:
        if item.name.startswith("test_a_claim_is_correct_"):
            # Of these, which take longest, every second combination: any two values of them are met together, and three
            # by the other strategies.
            met = ("composite-key", "force_generic_plan", "second-table", "UpdateStatus", "BatchSelect")
            if sum(value in item.nodeid for value in met) % 2:
                item.add_marker(pytest.mark.thorough)
        if "under_every_plan" in item.name:
            continue
        composite, own = "composite-key" in item.name, "TestRowsThatAreTheirOwnMessage" in item.nodeid
        is_server = "OnMariaDB" in item.nodeid
        if (composite and ("TestUpdateStatus" not in item.nodeid or is_server)) or (
            own and zlib.crc32(item.nodeid.encode()) % 3
        ):
            item.add_marker(pytest.mark.thorough)
        elif composite:
            item.add_marker(pytest.mark.once)
