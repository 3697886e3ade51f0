"""The tests that ``nox -s quick`` chooses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nearest import FOLDERS, ROOT, nearest

pytestmark = pytest.mark.once

CHANGED = "tests/unique/test_enqueue.py"
IMPORTING = "tests/unique/test_config.py::test_a[1]"
BESIDE = "tests/unique/test_async.py::test_b"
OTHER = "tests/web/test_live.py::test_c"


def chosen(changed: list[str], seconds: float, **took: float) -> set[str]:
    tests = [f"{CHANGED}::test_slow", IMPORTING, BESIDE, OTHER]
    return nearest(tests, changed, {f"{CHANGED}::test_slow": 60, **took}, seconds)


def test_a_changed_file_comes_first_however_slow_it_is() -> None:
    assert chosen([CHANGED], 60) == {f"{CHANGED}::test_slow"}


def test_tests_that_import_a_changed_module_come_before_their_folder() -> None:
    module = "tests/unique/models.py"
    assert "tests.unique.models" in (ROOT / "tests/unique/test_config.py").read_text()
    assert IMPORTING in chosen([module], 1)
    assert OTHER not in chosen([module], 1)


def test_the_folder_of_a_changed_package_comes_before_the_others() -> None:
    assert OTHER not in chosen(["sqlaqueue/unique/enqueue.py"], 1)
    assert chosen(["sqlaqueue/web/charts.py"], 0.5) == {OTHER}


def test_all_are_chosen_where_the_time_suffices() -> None:
    assert len(chosen([], 1000)) == 4


def test_each_package_has_tests() -> None:
    packages = {path.parent.name for path in (ROOT / "sqlaqueue").glob("*/__init__.py")}
    for package in packages:
        for folder in FOLDERS.get(package, [package]):
            assert Path(ROOT, "tests", folder).is_dir(), package
