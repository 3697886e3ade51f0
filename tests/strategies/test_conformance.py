"""The conformance suite: it tests a strategy of another package, and finds strategies that lack a safeguard."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import claim, complete, purge, retry
from sqlaqueue.exc import SqlaqueueError, UnknownStrategyError
from sqlaqueue.strategies import ClaimStrategy, find_strategy, strategy_names
from sqlaqueue.strategies.batch_select import BatchSelect
from sqlaqueue.strategies.delete_returning import DeleteReturning
from sqlaqueue.strategies.delete_row import DeleteRow
from sqlaqueue.strategies.update_status import UpdateStatus
from sqlaqueue.testing import QueueUnderTest, StrategyConformance
from tests.models import create, insert, make_job
from tests.servers import Database
from tests.strategies import mutants as m

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
    model = create(engine, make_job("acme"))
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


# -- the conformance suite finds strategies that lack one safeguard, each with the test that finds it --------------


class Caught(NamedTuple):
    """The test that finds a mutant, with its arguments."""

    test: str
    arguments: dict[str, Any]
    composite: bool = False


def by(test: str, **arguments: Any) -> Caught:
    return Caught(test, arguments)


another_claim = by("test_a_claim_passes_over_a_locked_job", lock="another claim")
foreign_key = by("test_a_claim_takes_a_job_that_a_child_row_references", lock="a child row's foreign key")
second_table = by("test_a_claim_does_not_wait_for_the_second_table_of_its_filter")
every_plan = by("test_a_claim_is_correct_under_every_plan", cache="force_custom_plan", filtered=False)
generic_plan = by("test_a_claim_is_correct_under_every_plan", cache="force_generic_plan", filtered=False)
CAUGHT: list[tuple[type[ClaimStrategy], Caught]] = [
    (m.UpdateStatusWaits, another_claim),
    (m.BatchSelectWaits, another_claim),
    (m.DeleteReturningWaits, another_claim),
    (m.DeleteRowWaits, another_claim),
    (m.CancelWaits, by("test_cancel_does_not_wait", lock="another claim")),
    (m.ExtendWaits, by("test_extend_passes_over_a_locked_job")),
    (m.UpdateStatusLocksKeys, foreign_key),
    (m.BatchSelectLocksKeys, foreign_key),
    (m.BatchSelectLocksKeys, by("test_a_claim_does_not_block_child_rows")),
    (m.DeleteReturningLocksKeys, foreign_key),
    (m.DeleteRowSharesKeys, foreign_key),
    (m.UpdateStatusLocksEverything, second_table),
    (m.BatchSelectLocksEverything, second_table),
    (m.BatchSelectLocksEverything, by("test_a_claim_does_not_lock_the_second_table_of_its_filter")),
    (m.LocksNothing, another_claim),
    (m.LocksNothing, by("test_a_job_claimed_concurrently_is_not_claimed_again")),
    (m.LocksNothing, by("test_concurrent_claimers_never_share_a_job")),
    (m.LocksOnlyTheMessage, by("test_a_claim_passes_over_a_locked_job", lock="FOR UPDATE")),
    (m.LocksOnlyTheJob, by("test_a_claim_does_not_wait_for_locks_in_the_side_tables")),
    (m.LocksOnlyTheJob, by("test_conditions_are_checked_again_when_a_job_is_locked", change="moved to the future")),
    (m.UpdateStatusRunsAgain, every_plan),
    (m.UpdateStatusRunsAgain, generic_plan),
    (m.DeleteRowRunsAgain, every_plan),
    (m.UpdateStatusRunsAgain, every_plan._replace(composite=True)),
    (m.DeleteRowRunsAgain, every_plan._replace(composite=True)),
    (m.PurgeCorrelates, by("test_verbs_accept_a_filter_with_a_second_table", verb=purge)),
    (m.UpdateStatusUnsorted, every_plan),
    (m.ComparesNoToken, by("test_a_late_result_changes_nothing", taken_over=True)),
    (m.ComparesNoToken, by("test_every_execution_of_a_claim_has_its_own_token")),
    (m.ComparesTheTokenOnly, by("test_a_late_result_changes_nothing", taken_over=False)),
    (m.OneTokenForAll, by("test_every_execution_of_a_claim_has_its_own_token")),
    (m.BlamesEverybody, by("test_jobs_claimed_together_get_their_attempt_back_when_rescued")),
    (m.BlamesNobody, by("test_a_job_that_ran_alone_keeps_its_attempt_when_rescued")),
    (m.KeepsReleasedAttempts, by("test_release")),
    (m.LosesReleasedMessages, by("test_release")),
    (m.NeverReconciles, by("test_reconcile_repairs_what_bypassed_the_triggers")),
    (m.NeverReconciles, by("test_jobs_committed_without_settlement_become_claimable")),
    (m.DeleteRowSettlesAnyRun, by("test_a_result_after_the_rollback_changes_nothing", done=True)),
    (m.PurgesTooMuch, by("test_purge_obeys_a_filter_and_a_limit")),
    (m.RequeuesWithItsPast, by("test_requeue_starts_from_zero")),
    (m.ListsOneTable, by("test_a_listing_shows_each_job_once_with_its_state")),
    (m.ListsTwice, by("test_a_listing_shows_each_job_once_with_its_state")),
    (m.ListsNoErrors, by("test_a_listing_shows_the_roles_of_a_job")),
    (m.ListsAllLetters, by("test_a_listing_can_be_limited_by_a_filter_and_states")),
    (m.ListsEveryState, by("test_a_listing_can_be_limited_by_a_filter_and_states")),
    (m.ListsUnderALock, by("test_a_listing_waits_for_no_lock")),
    (m.ListsKnownStates, by("test_a_listing_shows_an_unknown_status_as_other")),
]
"""Mutant to the test that catches it."""
REWRITTEN: list[tuple[type[ClaimStrategy], str, str, Caught]] = [
    (
        UpdateStatus,
        "OF sqlaqueue_expired_job SKIP LOCKED",
        "OF sqlaqueue_expired_job",
        by("test_rescue_passes_over_a_locked_job"),
    ),
    (
        UpdateStatus,
        "status = 'pending' AND sqlaqueue_mate.",
        "false AND sqlaqueue_mate.",
        by("test_jobs_claimed_together_and_rescued_one_by_one"),
    ),
    (
        UpdateStatus,
        "run_at <= statement_timestamp()",
        "run_at <= now()",
        by("test_a_job_that_comes_due_during_a_transaction_is_claimed"),
    ),
    (UpdateStatus, "statement_timestamp() +", "now() +", by("test_a_lease_counts_from_the_statement")),
    (BatchSelect, "statement_timestamp() +", "now() +", by("test_a_delay_counts_from_the_statement", verb=retry)),
    (
        BatchSelect,
        "FOR UPDATE OF conformance_job SKIP LOCKED",
        "FOR UPDATE OF conformance_job",
        by("test_purge_passes_over_a_locked_job"),
    ),
    (
        DeleteReturning,
        "DO UPDATE SET priority = excluded.priority, run_at = excluded.run_at",
        "DO NOTHING",
        by("test_an_edited_priority_reaches_the_claim"),
    ),
    (DeleteReturning, "IF TG_OP = 'TRUNCATE' THEN", "IF false THEN", by("test_truncate")),
    (DeleteReturning, "FROM old_rows));", "FROM old_rows WHERE false));", by("test_a_deleted_job_leaves_no_message")),
    (
        DeleteReturning,
        "FOR NO KEY UPDATE OF conformance_job SKIP LOCKED",
        "FOR NO KEY UPDATE OF conformance_job",
        by("test_reconcile_passes_over_a_locked_job"),
    ),
]
"""Strategy, what of its SQL is replaced by what, and the test that catches it: for remedies without a seam."""


def _assert_caught(engine: sa.Engine, strategy: type[ClaimStrategy], caught: Caught) -> None:
    columns = {"status": None} if issubclass(strategy, DeleteRow) else {}
    test = getattr(StrategyConformance(), caught.test)
    queue = QueueUnderTest(engine, strategy(), columns, composite=caught.composite)
    with queue, pytest.raises((AssertionError, sa.exc.DBAPIError, SqlaqueueError)):
        test(queue, **caught.arguments)


@contextmanager
def _rewriting(engine: sa.Engine, old: str, new: str) -> Iterator[list[str]]:
    """Replace a part of every statement; the statements in which it was found are in the list."""
    rewritten: list[str] = []

    def rewrite(*event: Any) -> tuple[str, Any]:
        statement, parameters = event[2:4]
        if old in statement:
            rewritten.append(statement)
        return statement.replace(old, new), parameters

    sa.event.listen(engine, "before_cursor_execute", rewrite, retval=True)
    try:
        yield rewritten
    finally:
        sa.event.remove(engine, "before_cursor_execute", rewrite)


@pytest.mark.once
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mutant", "caught"), CAUGHT, ids=[f"{mutant.__name__}-{caught.test}" for mutant, caught in CAUGHT]
)
def test_a_mutant_is_caught(class_engine: sa.Engine, mutant: type[ClaimStrategy], caught: Caught) -> None:
    _assert_caught(class_engine, mutant, caught)


@pytest.mark.once
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("strategy", "old", "new", "caught"), REWRITTEN, ids=[f"{old}-{caught.test}" for _, old, _, caught in REWRITTEN]
)
def test_rewritten_sql_is_caught(
    class_engine: sa.Engine, strategy: type[ClaimStrategy], old: str, new: str, caught: Caught
) -> None:
    with _rewriting(class_engine, old, new) as rewritten:
        _assert_caught(class_engine, strategy, caught)
    assert rewritten, "there was nothing to take out"
