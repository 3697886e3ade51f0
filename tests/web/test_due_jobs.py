"""The lists of due jobs, and of jobs whose lease has expired: which jobs, in which order, and at what cost."""

import html
import re
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Mapped, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, Unique
from sqlaqueue.admin.state import depth
from sqlaqueue.web.data.job_filters import lists_of, parse_filter
from sqlaqueue.web.data.job_pages import Count, count_states
from sqlaqueue.web.data.reader import ParameterError
from tests.models import execute, new_base, sent_statements
from tests.strategies.conftest import buffers_of, nodes_of
from tests.web.conftest import ask
from tests.web.jobs import columns, cost, created, keys, keys_by_sql, make_window_small, page, pages, plan_of
from tests.web.models import make_messages, make_rows

DUE, EXPIRED = ("state", "due"), ("state", "expired")
ROWS = """
INSERT INTO row (id, few, many, other, status, priority, run_at, attempts, created_at)
SELECT n, n % 2, n / 10, n % 1000, CASE WHEN n % 7 = 0 THEN 'completed' ELSE 'pending' END,
       n % 3, now() + (n * 7919 % 300 - 100) * interval '1 min', 0, now()
FROM generate_series(1, 300) n
"""


def counts(engine: sa.Engine, model: Any, *pairs: tuple[str, str]) -> Any:
    with Session(engine) as session:
        return count_states(session, parse_filter(columns(model), pairs))


def fill(engine: sa.Engine, model: Any) -> None:
    model.metadata.create_all(engine)
    execute(engine, ROWS)


def expected(engine: sa.Engine, order: str, and_where: str = "true") -> list[str]:
    statement = f"SELECT id FROM row WHERE status = 'pending' AND run_at <= now() AND {and_where} ORDER BY {order}"
    return keys_by_sql(engine, statement)


STRATEGIES = ("update_status", "batch_select", "delete_returning")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("few", [1000, 3])
def test_due_jobs_are_listed_in_claim_order_where_an_index_has_it(
    engine: sa.Engine, strategy: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sqlaqueue.web.data.job_windows.FEW", few)
    model = make_rows(strategy)
    fill(engine, model)
    # Claims of delete_returning read the index of the messages, so that none of the jobs has their order.
    order = "id DESC" if strategy == "delete_returning" else "priority, run_at, id"
    wanted = expected(engine, order)
    assert 50 < len(wanted) < 150
    forward = list(pages(engine, model, DUE, size=20))
    assert keys(forward) == wanted
    assert forward[0].sort == ("-id" if strategy == "delete_returning" else "priority")
    back = [page(engine, model, DUE, ("before", each.previous), size=20) for each in forward if each.previous]
    assert keys(back) == keys(forward[:-1])
    assert keys(pages(engine, model, DUE, ("sort", "-many"), ("f.few", "1"), size=7)) == expected(
        engine, "many DESC, id DESC", "few = 1"
    )
    counted = counts(engine, model)
    assert counted["due"] == Count(len(wanted), is_complete=True)
    with Session(engine) as session:
        assert depth(session, model).due == len(wanted)
    filtered = counts(engine, model, DUE, ("f.few", "1"))
    assert filtered["due"] == Count(len(expected(engine, "id", "few = 1")), is_complete=True)


def test_due_jobs_of_one_priority_are_sorted_by_their_time(engine: sa.Engine) -> None:
    model = make_rows()
    fill(engine, model)
    found = list(pages(engine, model, DUE, ("f.priority", "1"), size=7))
    assert found[0].sort == "run_at"
    assert keys(found) == expected(engine, "run_at, id", "priority = 1")


def test_without_a_priority_the_oldest_due_job_comes_first(engine: sa.Engine) -> None:
    model = created(engine, make_rows(columns={"priority": None}))
    execute(engine, ROWS.replace("priority, ", "").replace("n % 3, ", ""))
    found = list(pages(engine, model, DUE, size=20))
    assert found[0].sort == "run_at"
    assert keys(found) == expected(engine, "run_at, id")


def test_a_job_without_a_time_is_due(engine: sa.Engine) -> None:
    model = created(engine, make_messages())
    execute(
        engine,
        "INSERT INTO note (text, run_at) VALUES ('a', NULL), ('b', now() - interval '1 h'), "
        "('c', now() + interval '1 h')",
    )
    assert keys(pages(engine, model, DUE, size=1)) == ["2", "1"]
    assert counts(engine, model)["due"] == Count(2, is_complete=True)


def test_many_priorities_leave_no_due_job_out(engine: sa.Engine) -> None:
    model = created(engine, make_rows())
    execute(
        engine,
        "INSERT INTO row (id, status, priority, run_at, attempts, created_at) "
        "SELECT n, 'pending', n, now() - interval '1 min', 0, now() FROM generate_series(1, 150) n",
    )
    assert keys(pages(engine, model, DUE, size=40)) == [str(number) for number in range(1, 151)]
    assert counts(engine, model)["due"] == Count(150, is_complete=True)


def leased(engine: sa.Engine, **options: Any) -> Any:
    model = created(engine, make_rows(**options))
    execute(
        engine,
        "INSERT INTO row (id, few, status, priority, run_at, attempts, created_at, lease_expires_at) "
        "SELECT n, n % 2, CASE WHEN n = 9 THEN 'completed' ELSE 'processing' END, 0, now(), 1, now(), "
        "CASE WHEN n = 8 THEN to_timestamp(0) ELSE now() + (n * 7919 % 11 - 5) * interval '1 min' END "
        "FROM generate_series(1, 40) n",
    )
    return model


@pytest.mark.parametrize("options", [{}, {"unique": Unique("other", on_return="wait")}])
def test_expired_leases_are_listed_the_oldest_first(engine: sa.Engine, options: Any) -> None:
    model = leased(engine, **options)
    statement = (
        "SELECT id FROM row WHERE status = 'processing' AND lease_expires_at <= now() AND id <> 8 "
        "ORDER BY lease_expires_at, id"
    )
    wanted = keys_by_sql(engine, statement)
    assert len(wanted) > 10
    found = list(pages(engine, model, EXPIRED, size=4))
    assert found[0].sort == "lease_expires_at"
    assert keys(found) == wanted
    assert counts(engine, model)["expired"] == Count(len(wanted), is_complete=True)
    with Session(engine) as session:
        assert depth(session, model).expired == len(wanted)


def test_what_a_queue_cannot_tell_is_not_offered(engine: sa.Engine) -> None:
    def offered(model: Any, *redacted: str) -> set[str]:
        return {"due", "expired"} & set(lists_of(columns(model, *redacted)))

    assert offered(make_rows()) == {"due", "expired"}
    assert offered(make_rows("batch_select")) == {"due"}
    assert offered(make_rows("delete_returning")) == {"due"}
    assert offered(make_rows(columns={"run_at": None})) == {"expired"}
    assert offered(make_rows(columns={"lease_expires_at": None})) == {"due"}
    assert offered(make_rows(), "run_at", "lease_expires_at") == set()
    with pytest.raises(ParameterError, match="use one of pending, due, completed"):
        parse_filter(columns(make_rows("batch_select")), [EXPIRED])
    assert parse_filter(columns(make_rows()), [DUE]).parameters() == [DUE]


WINDOW = 1000


@pytest.fixture(params=["analyzed", "never analyzed"])
def large(engine: sa.Engine, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a queue with 30,000 pending jobs of three priorities, of which 60 are due."""
    make_window_small(monkeypatch, WINDOW)
    model = created(engine, make_rows())
    execute(engine, "ALTER TABLE row SET (autovacuum_enabled = false)")
    execute(
        engine,
        "INSERT INTO row (id, few, many, other, status, priority, run_at, attempts, created_at) "
        "SELECT n, n % 2, n / 10, n % 1000, 'pending', n % 3, "
        "now() + (n - 60) * interval '1 min' - interval '1 s', 0, now() FROM generate_series(1, 30000) n",
    )
    if request.param == "analyzed":
        execute(engine.execution_options(isolation_level="AUTOCOMMIT"), "VACUUM ANALYZE row")
    return model


@pytest.mark.parametrize("sort", [None, "-id", "many", "-few"])
def test_few_due_jobs_among_many_pending_ones_are_read_by_the_index_of_claims(
    engine: sa.Engine, large: Any, sort: str | None
) -> None:
    pairs = [DUE, *([] if sort is None else [("sort", sort)])]
    assert len(page(engine, large, *pairs).jobs) == 50
    # The index is read up to four times for the 60 jobs; that there are more pending ones than a window is counted.
    buffers, rows = cost(engine, large, *pairs)
    assert rows <= WINDOW + 1 + 300
    assert buffers <= WINDOW + 700


def test_counting_due_jobs_reads_the_index_of_claims(engine: sa.Engine, large: Any) -> None:
    with sent_statements(engine) as sent:
        assert counts(engine, large)["due"] == Count(60, is_complete=True)
    plan = plan_of(engine, large, *next(each for each in sent if "due_key_0" in each[0]))
    scans = [node for node in nodes_of(plan) if "Relation Name" in node]
    assert {node["Index Name"] for node in scans} == {"ix_row_queue_claim"}
    assert buffers_of(plan) <= 150


def test_a_backlog_is_read_in_claim_order(engine: sa.Engine, large: Any) -> None:
    execute(engine, "UPDATE row SET run_at = now() - id * interval '1 s'")
    execute(engine.execution_options(isolation_level="AUTOCOMMIT"), "VACUUM row")
    first = page(engine, large, DUE)
    assert first.sort == "priority"
    assert [job.key for job in first.jobs] == [str(number) for number in range(30_000, 29_850, -3)]
    _, rows = cost(engine, large, DUE, ("after", first.next or ""))
    # One count of a window, and one page.
    assert rows <= WINDOW + 1 + 60
    assert counts(engine, large)["due"] == Count(WINDOW + 1, is_complete=False)


def test_expired_leases_are_read_by_the_index_of_leases(engine: sa.Engine, large: Any) -> None:
    execute(engine, "UPDATE row SET status = 'processing', lease_expires_at = now() + (id - 30) * interval '1 min'")
    execute(engine.execution_options(isolation_level="AUTOCOMMIT"), "VACUUM row")
    buffers, rows = cost(engine, large, EXPIRED)
    assert rows <= 100
    assert buffers <= 300
    assert counts(engine, large)["expired"] == Count(30, is_complete=True)


@pytest.mark.usefixtures("no_examination")
async def test_numbers_lead_to_their_jobs(client_of: Any, engine: sa.Engine) -> None:
    execute(
        engine,
        "INSERT INTO email (recipient, status, priority, run_at, attempts, max_attempts, created_at, "
        "lease_expires_at) SELECT 'a', CASE WHEN n = 1 THEN 'processing' ELSE 'pending' END, 0, "
        "now() + (n - 3) * interval '1 h', 0, 5, now(), now() - n * interval '1 h' FROM generate_series(1, 6) n",
    )
    async with client_of() as browser:
        overview, queue = [(await browser.get(path)).text for path in ("/", "/queues/email")]
        for listed in ("due", "expired"):
            assert f"/queues/email/jobs?state={listed}" in overview
            assert f"jobs?state={listed}" in queue
        assert "/queues/invoice/jobs?state=due" in overview
        assert "jobs?state=expired" not in overview.replace("/queues/email/jobs?state=expired", "")
        due = (await browser.get("/queues/email/jobs?state=due")).text
        assert "<h1>Jobs</h1>" in due
        assert re.findall(r'name="key" value="(\d+)"', due) == ["2", "3"]
        assert "In claim order" in due
        assert 'name="state" value="due"' in due, "the filter and the actions on all jobs keep the list"
        expired = (await browser.get("/queues/email/jobs?state=expired")).text
        assert re.findall(r'name="key" value="(\d+)"', expired) == ["1"]
        assert "Rescue" in expired
        assert (await browser.get("/queues/invoice/jobs?state=expired")).status_code == 400
    async with client_of(redact=["run_at"]) as browser:
        assert "jobs?state=due" not in (await browser.get("/")).text
        assert "/queues/email/jobs?state=pending" in (await browser.get("/")).text


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_an_action_on_all_due_jobs_changes_these_only(
    engine: sa.Engine, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_rows(strategy)
    fill(engine, model)
    caplog.set_level("INFO", "sqlaqueue.audit")
    wanted = set(expected(engine, "id", "few = 1"))
    async with ask(engine, model) as browser:
        query = "action=cancel&all=1&state=due&f.few=1"
        page = (await browser.get(f"/queues/row/confirm?{query}")).text
        assert f"Cancel {len(wanted)} jobs?" in page
        assert "state: due" in page
        fields = re.findall(r'type="hidden" name="([^"]+)" value="([^"]*)"', page)
        # It becomes due after the preview.
        execute(
            engine,
            "UPDATE row SET run_at = statement_timestamp() WHERE id = (SELECT min(id) FROM row "
            "WHERE status = 'pending' AND run_at > now() + interval '1 min' AND few = 1)",
        )
        data = {name: html.unescape(value) for name, value in fields}
        response = await browser.post("/queues/row/actions/cancel", data=data)
        assert response.status_code == 303, response.text
    assert set(keys_by_sql(engine, "SELECT id FROM row WHERE status = 'cancelled'")) == wanted
    assert f"action=cancel queue='row' count={len(wanted)} keys=" in caplog.text
    assert "filter='state=due&f.few=1'" in caplog.text


async def test_an_action_on_all_expired_leases(engine: sa.Engine) -> None:
    model = leased(engine)
    async with ask(engine, model) as browser:
        page = (await browser.get("/queues/row/confirm?action=cancel&all=1&state=expired")).text
    number = counts(engine, model)["expired"].number
    assert f"Cancel {number} jobs?" in page


def test_a_table_with_a_key_of_two_columns(engine: sa.Engine) -> None:
    class Pair(QueueMixin, new_base()):
        __tablename__ = "pair"
        __queue__ = QueueConfig()
        tenant: Mapped[str] = mapped_column(primary_key=True)
        number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)

    Pair.metadata.create_all(engine)
    execute(
        engine,
        "INSERT INTO pair (tenant, number, status, priority, run_at, attempts, created_at) "
        "SELECT 't' || n % 2, n, 'pending', 0, now() + (n - 5) * interval '1 h', 0, now() "
        "FROM generate_series(1, 9) n",
    )
    assert keys(pages(engine, Pair, DUE, size=2)) == ["t1,1", "t0,2", "t1,3", "t0,4", "t1,5"]
