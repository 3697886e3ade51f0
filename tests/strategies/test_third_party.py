"""A strategy of another package: one class and one entry point, tested by the conformance suite."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import claim, complete
from sqlaqueue.exc import UnknownStrategyError
from sqlaqueue.strategies import find_strategy, strategy_names
from tests.models import insert, make_job

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers import Database

MODULE = '''
from sqlaqueue.strategies import ClaimStrategy


class ByLock(ClaimStrategy):
    """Holds the rows by their locks."""

    name = "acme"
    holds_transaction = True

    def claim(self, request):
        spec = request.spec
        waiting = self.pick(spec, request.candidates, *spec.table.c).where(spec.in_state("pending"))
        rows = self.first_due(spec, waiting, spec.table, request.limit, request.scan_range)
        return self.in_claim_order(spec, self.lock(spec, rows).cte("claimed"))

    def fence(self, spec, held):
        return super().fence(spec, held) & spec.in_state("pending")


class NoStrategy:
    pass
'''
ENTRY_POINTS = """
[sqlaqueue.strategies]
acme = acme_queue:ByLock
acme_broken = acme_queue:NoStrategy
"""
TESTS = """
import pytest
from sqlalchemy import create_engine
from sqlaqueue.testing import StrategyConformance


@pytest.fixture(scope="session")
def engine():
    engine = create_engine({url!r}, pool_size=12)
    yield engine
    engine.dispose()


class TestAcme(StrategyConformance):
    strategy = "acme"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which a package is installed that brings a strategy."""
    (tmp_path / "acme_queue.py").write_text(MODULE)
    information = tmp_path / "acme_queue-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-queue\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "acme_queue", raising=False)
    importlib.invalidate_caches()
    return tmp_path


@pytest.mark.usefixtures("installed")
def test_a_strategy_is_found_by_its_entry_point(engine: sa.Engine) -> None:
    assert "acme" in strategy_names()
    model = make_job("acme")
    model.metadata.create_all(engine)
    insert(engine, model, 2)
    with Session(engine) as session, Session(engine) as another:
        (job,) = session.scalars(claim(model, 1)).all()
        assert len(another.scalars(claim(model, 5)).all()) == 1
        another.rollback()
        assert session.scalars(complete(job)).all() == [job.id]
        session.commit()
        assert len(another.scalars(claim(model, 5)).all()) == 1


@pytest.mark.usefixtures("installed")
def test_an_entry_point_that_is_no_strategy_is_refused() -> None:
    with pytest.raises(UnknownStrategyError, match=r"'acme_broken'.*NoStrategy.*ClaimStrategy"):
        find_strategy("acme_broken")


@pytest.mark.usefixtures("installed")
def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownStrategyError, match=r"'amce'.*'update_status'.*'acme'"):
        find_strategy("amce")


def test_a_strategy_may_be_given_as_an_instance() -> None:
    strategy = find_strategy("batch_select")
    assert find_strategy(strategy) is strategy


@pytest.mark.once
def test_only_the_suite_needs_pytest() -> None:
    program = "import sys, sqlaqueue; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.once
def test_the_suite_runs_in_another_project(installed: Path, database: Database) -> None:
    """With nothing of this project's test configuration, by the lines of the suite's docstring."""
    (installed / "test_acme.py").write_text(TESTS.format(url=database.url()))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"]
    chosen = "at_most_n or passes_over_a_locked_job or late_result or committed_unsettled"
    run = subprocess.run(
        [*command, "-k", chosen, "test_acme.py"],
        cwd=installed,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(installed), *sys.path]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
