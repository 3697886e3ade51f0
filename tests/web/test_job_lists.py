"""Pages of a list of jobs: complete, without repetitions, in both directions, and at the same cost."""

import base64
import json
import random
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import cancel, claim, fail
from sqlaqueue.web.data.job_filters import parse_filter
from sqlaqueue.web.data.job_pages import CAP, Count, count_states, cursor_text
from sqlaqueue.web.data.job_sources import orders_of, source_of
from sqlaqueue.web.data.reader import ParameterError
from tests.models import execute, sent_statements
from tests.strategies.conftest import nodes_of
from tests.web.jobs import columns, cost, created, keys, keys_by_sql, make_window_small, page, pages, plan_of
from tests.web.models import make_messages, make_pairs, make_rows, make_tokens

ORDERS = {
    "id": "id",
    "-id": "id DESC",
    "few": "few, many DESC NULLS LAST, id",
    "-few": "few DESC, many NULLS FIRST, id DESC",
    "many": "many, id",
    "-many": "many DESC, id DESC",
    "other": "other, id",
    "-other": "other DESC, id DESC",
}
FILTERS: list[tuple[list[tuple[str, str]], str]] = [
    ([], "true"),
    ([("f.other", "5")], "other = 5"),
    ([("f.few.min", "2")], "few >= 2"),
    ([("f.many.null", "no"), ("f.few", "1")], "many IS NOT NULL AND few = 1"),
    ([("state", "pending"), ("f.many.max", "20")], "status = 'pending' AND many <= 20"),
]
ALL = [
    *FILTERS,
    ([("f.many.null", "yes")], "many IS NULL"),
    ([("state", "failed")], "status = 'failed'"),
    ([("f.few", "1"), ("f.other", "5")], "few = 1 AND other = 5"),
]


def fill(engine: sa.Engine, model: Any, seed: int, rows: int = 150) -> None:
    chance = random.Random(seed)
    states = ["pending", "pending", "processing", "failed", "completed", "cancelled"]
    values = [
        {
            "id": number * 7 % 1009,
            "few": chance.choice([None, 1, 1, 1, 2, 3]),
            "many": chance.choice([None, chance.randrange(1000), chance.randrange(30)]),
            "other": chance.choice([None, 5, chance.randrange(10)]),
            "status": chance.choice(states),
            "priority": chance.randrange(3),
        }
        for number in range(1, rows + 1)
    ]
    execute(engine, sa.insert(model.__table__).values(values))


def selected(engine: sa.Engine, where: str, order: str) -> list[str]:
    return keys_by_sql(engine, f"SELECT id FROM row WHERE {where} ORDER BY {order}")


@pytest.fixture
def rows(engine: sa.Engine) -> Any:
    model = created(engine, make_rows())
    fill(engine, model, seed=1)
    return model


@pytest.mark.few(3)
@pytest.mark.parametrize("sort", ORDERS)
def test_pages_are_complete_in_both_directions(engine: sa.Engine, rows: Any, sort: str) -> None:
    for parameters, where in ALL if sort in {"few", "-many"} else FILTERS:
        found = list(pages(engine, rows, *parameters, ("sort", sort), size=20))
        wanted = selected(engine, where, ORDERS[sort])
        assert sorted(keys(found)) == sorted(wanted), where
        if not {"f.few", "f.few.min"} & {name for name, _ in parameters}:
            assert keys(found) == wanted, where
        assert all(len(each.jobs) == 20 for each in found[:-1])
        if found[-1].previous is None:
            assert len(found) == 1
            continue
        back = pages(engine, rows, *parameters, ("sort", sort), size=20, before=found[-1].previous, backwards=True)
        assert keys(reversed(list(back))) == keys(found[:-1]), where


@pytest.mark.parametrize("window", [40, 17])
@pytest.mark.parametrize("sort", ["id", "-few", "many"])
def test_windows_that_end_early_lose_nothing(
    engine: sa.Engine, rows: Any, sort: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_window_small(monkeypatch, window)
    for parameters, where in FILTERS[1:] if window == 40 else FILTERS[1:3]:
        found = list(pages(engine, rows, *parameters, ("sort", sort), size=20))
        assert sorted(keys(found)) == sorted(selected(engine, where, "id")), where
        ended_early = [each for each in found if each.examined is not None]
        assert all(each.next is not None and len(each.jobs) < 20 for each in ended_early)
        if found[-1].previous is not None:
            back = pages(engine, rows, *parameters, ("sort", sort), size=20, before=found[-1].previous, backwards=True)
            backwards = [key for key in keys(reversed(list(back))) if key in keys(found[:-1])]
            assert backwards == keys(found[:-1]), where


def test_filter_of_few_rows_is_not_searched_in_parts(engine: sa.Engine, rows: Any) -> None:
    (found,) = pages(engine, rows, ("f.many.max", "3"), ("f.other", "5"), size=100)
    assert found.examined is None


@pytest.mark.parametrize("sort", ["id", "few", "-many", "other"])
def test_other_transactions_between_pages_hide_and_repeat_nothing(engine: sa.Engine, rows: Any, sort: str) -> None:
    chance = random.Random(sort)
    kept = set(selected(engine, "id % 3 > 0", "id"))
    seen: list[str] = []
    number = 2000
    for found in pages(engine, rows, ("sort", sort), size=9):
        seen += keys([found])
        with engine.begin() as connection:
            gone = "DELETE FROM row WHERE id IN (SELECT id FROM row WHERE id % 3 = 0 ORDER BY random() LIMIT 5)"
            connection.execute(sa.text(gone))
            if number < 2100:
                # Rows that are equal to those of the page in all but their key.
                few, many = chance.choice(["NULL", "1", "2"]), chance.choice(["NULL", "5", "900"])
                for number in range(number + 1, number + 6):  # noqa: B020 - counts on
                    insert = f"INSERT INTO row (id, few, many, other) VALUES ({number * 3}, {few}, {many}, 5)"
                    connection.exec_driver_sql(insert)
    assert len(seen) == len(set(seen))
    assert kept <= set(seen)


def test_sorts_are_those_of_the_indexes_of_the_live_table(engine: sa.Engine, rows: Any) -> None:
    assert set(page(engine, rows).sorts) == {"id", "few", "many", "other"}
    assert set(page(engine, rows, ("state", "pending")).sorts) == {"id", "few", "many", "other", "priority"}
    assert "lease_expires_at" in page(engine, rows, ("state", "processing")).sorts
    assert "priority" not in page(engine, rows, ("state", "pending")).lasting_sorts
    execute(engine, "DROP INDEX whole")
    execute(engine, "CREATE INDEX ON row (status) WHERE priority = 0")
    execute(engine, "CREATE INDEX ON row (lower(status), attempts)")
    execute(engine, "CREATE INDEX ON row USING hash (max_attempts)")
    execute(engine, 'CREATE INDEX ON row (last_error COLLATE "C")')
    execute(engine, "CREATE INDEX ON row (claimed_by text_pattern_ops)")
    execute(engine, "CREATE INDEX ON row (finished_at DESC, attempts)")
    assert set(page(engine, rows).sorts) == {"id", "few", "many", "finished_at"}
    with pytest.raises(ParameterError, match="sort"):
        page(engine, rows, ("sort", "other"))
    assert len(page(engine, rows, ("f.other", "5"), ("f.few", "1")).jobs) > 0


def test_claim_order_is_that_of_the_pending_jobs(engine: sa.Engine, rows: Any) -> None:
    found = list(pages(engine, rows, ("state", "pending"), ("sort", "priority"), size=7))
    assert keys(found) == selected(engine, "status = 'pending'", "priority, run_at, id")


def test_cursors_are_checked(engine: sa.Engine, rows: Any) -> None:
    first = page(engine, rows, ("sort", "few"), size=5)
    assert first.next is not None

    def encoded(content: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")

    content = json.loads(base64.urlsafe_b64decode(first.next + "=="))
    order = content[0]
    wrong = [
        "",
        first.next[:-3],
        f"{first.next}A",
        "x" * 9000,
        "\u00e9",
        encoded({}),
        encoded([]),
        encoded([order]),
        encoded([order, "1"]),
        encoded([order, "1", "2", "3", "4"]),
        encoded([order, 1, 2, 3]),
        encoded([order, "1", "2", None]),
        encoded([order, "1 OR 1=1", "2", "3"]),
        encoded([order, "1", "2", str(2**63)]),
        encoded([order, ["1"], "2", "3"]),
        encoded(["-few", *content[1:]]),
        encoded("[" * 5000),
    ]
    for cursor in wrong[1:]:
        for parameter in ("after", "before"):
            with pytest.raises(ParameterError) as caught:
                page(engine, rows, ("sort", "few"), (parameter, cursor))
            assert caught.value.parameter == parameter
    with pytest.raises(ParameterError, match="after: it belongs to a list in another order"):
        page(engine, rows, ("sort", "-few"), ("after", first.next))
    with pytest.raises(ParameterError, match="before: give one"):
        page(engine, rows, ("sort", "few"), ("after", first.next), ("before", first.next))


def test_composite_keys_page_in_their_order(engine: sa.Engine) -> None:
    model = created(engine, make_pairs())
    values = [{"tenant": tenant, "number": number} for tenant in ("b", 'a,"', "") for number in range(-3, 12)]
    with engine.begin() as connection:
        connection.execute(sa.insert(model.__table__), values)
        in_order = "SELECT tenant, number FROM pair ORDER BY tenant, number"
        wanted = [tuple(row) for row in connection.exec_driver_sql(in_order)]
    found = list(pages(engine, model, ("sort", "tenant"), size=4))
    assert [job.position for each in found for job in each.jobs] == [(tenant, str(number)) for tenant, number in wanted]
    assert keys(pages(engine, model, size=4)) == keys(found)[::-1]
    assert sorted(keys(pages(engine, model, ("state", "pending"), size=4))) == sorted(keys(found))


# -- the order of a list for which none is given ----------------------------------------------------------------------

MONTH = {"completed": timedelta(days=30), "failed": timedelta(days=30)}
TIMES = """
INSERT INTO {table} (id, {own}, status, priority, run_at, attempts, created_at, finished_at)
SELECT {key}, n, CASE WHEN n % 3 = 0 THEN 'pending' WHEN n % 3 = 1 THEN 'failed' ELSE 'completed' END, n % 2,
       now() - n * 7 % 101 * interval '1 min', 0, now() - n * interval '1 min',
       CASE WHEN n % 3 > 0 THEN now() - n * 11 % 97 * interval '1 min' END
FROM generate_series(1, 90) n
"""


def fill_times(engine: sa.Engine, model: Any) -> None:
    name = model.__table__.name
    key, own = ("gen_random_uuid()", "number") if name == "token" else ("n", "other")
    execute(engine, TIMES.format(table=name, own=own, key=key))


def in_order(engine: sa.Engine, model: Any, state: str, order: str) -> list[str]:
    return keys_by_sql(engine, f"SELECT id FROM {model.__table__.name} WHERE status = '{state}' ORDER BY {order}")


@pytest.mark.parametrize("make", [make_rows, make_tokens])
@pytest.mark.parametrize("state", ["completed", "failed"])
def test_finished_jobs_are_listed_newest_first_where_an_index_has_them(
    engine: sa.Engine, make: Any, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_window_small(monkeypatch, 10)  # nothing is few, so that only an index can give this order
    model = created(engine, make(retention=MONTH))
    fill_times(engine, model)
    found = list(pages(engine, model, ("state", state), size=7))
    assert keys(found) == in_order(engine, model, state, "finished_at DESC, id DESC")
    assert {each.sort for each in found} == {"-finished_at"}
    back = pages(engine, model, ("state", state), size=7, before=found[-1].previous, backwards=True)
    assert keys(reversed(list(back))) == keys(found[:-1])


def test_finished_jobs_without_such_an_index_are_listed_by_an_integer_key(engine: sa.Engine) -> None:
    model = created(engine, make_rows())
    fill_times(engine, model)
    with sent_statements(engine) as sent:
        assert keys(pages(engine, model, ("state", "failed"), size=7)) == in_order(engine, model, "failed", "id DESC")
    # The integer key needs no count of whether few rows can be sorted.
    assert not any("finished_at DESC" in statement for statement, _ in sent)


@pytest.mark.parametrize("make", [make_rows, make_tokens])
def test_pending_jobs_are_listed_in_claim_order(engine: sa.Engine, make: Any) -> None:
    model = created(engine, make())
    fill_times(engine, model)
    found = list(pages(engine, model, ("state", "pending"), size=7))
    assert keys(found) == in_order(engine, model, "pending", "priority, run_at, id")
    of_one = keys(pages(engine, model, ("state", "pending"), ("f.priority", "1"), size=7))
    wanted = [key for key in keys(found) if key in of_one]
    assert of_one == wanted
    assert len(of_one) == 15


def test_few_jobs_with_keys_without_time_are_sorted_by_time(engine: sa.Engine) -> None:
    model = created(engine, make_tokens())
    fill_times(engine, model)
    orders = {"failed": "finished_at DESC, id DESC", "completed": "finished_at DESC, id DESC"}
    for state, order in orders.items():
        found = list(pages(engine, model, ("state", state), size=7))
        assert keys(found) == in_order(engine, model, state, order)
        back = pages(engine, model, ("state", state), size=7, before=found[-1].previous, backwards=True)
        assert keys(reversed(list(back))) == keys(found[:-1])
        assert "finished_at" in found[0].sorts
        oldest = keys(pages(engine, model, ("state", state), ("sort", "finished_at"), size=7))
        assert oldest == keys(found)[::-1]
    by_creation = keys(pages(engine, model, size=7))
    assert by_creation == keys_by_sql(engine, "SELECT id FROM token ORDER BY created_at DESC, id DESC")


def test_many_jobs_with_keys_without_time_are_not_sorted(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    make_window_small(monkeypatch, 10)
    model = created(engine, make_tokens())
    fill_times(engine, model)
    found = page(engine, model, ("state", "failed"))
    assert found.sort == "-id"
    assert "finished_at" not in found.sorts
    with pytest.raises(ParameterError, match="sort: no index gives this order"):
        page(engine, model, ("state", "failed"), ("sort", "finished_at"))
    execute(engine, "CREATE INDEX ON token (created_at)")
    assert page(engine, model).sort == "-created_at"


def test_a_redacted_time_gives_no_order(engine: sa.Engine) -> None:
    model = created(engine, make_tokens(retention=MONTH))
    fill_times(engine, model)
    found = page(engine, model, ("state", "failed"), redacted=["finished_at"])
    assert found.sort == "-created_at"
    found = page(engine, model, ("state", "failed"), redacted=["finished_at", "created_at"])
    assert found.sort == "-id"


@pytest.mark.parametrize("window", [20_000, 5])
def test_dead_letters_are_listed_with_their_columns(
    engine: sa.Engine, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_window_small(monkeypatch, window)
    model = created(engine, make_messages())
    with Session(engine) as session:
        moods = ["SAD", "GLAD"]
        rows = [
            {"id": number, "text": f"t{number % 2}", "Amount": number / 4, "mood": moods[number % 2]}
            for number in range(1, 41)
        ]
        session.execute(sa.insert(model.__table__), rows)
        session.commit()
        session.execute(cancel(sa.select(model).where(model.id > 30)))
        session.commit()
        jobs = session.scalars(claim(sa.select(model).where(model.id <= 20), 20)).all()
        session.execute(fail(jobs, error="ValueError: no"))
        session.commit()
    # In claim order; all of them are due since the same moment.
    assert keys(pages(engine, model, size=3)) == [str(number) for number in range(21, 31)]
    failed = list(pages(engine, model, ("state", "failed"), size=3))
    assert keys(failed) == [str(number) for number in range(20, 0, -1)]
    cells = next(each.jobs for each in failed if each.jobs)[0].cells
    texts = {cell.column.name: cell.text for cell in cells}
    assert (texts["text"], texts["amount"], texts["mood"], texts["last_error"]) == (
        "t0",
        "5.00",
        "SAD",
        "ValueError: no",
    )
    assert keys(pages(engine, model, ("state", "cancelled"), ("sort", "id"), size=3)) == [str(n) for n in range(31, 41)]
    odd = [("state", "failed"), ("f.text", "t1"), ("f.amount.min", "2.25"), ("f.mood", "GLAD"), ("error", "ValueError")]
    assert keys(pages(engine, model, *odd, size=3)) == ["19", "17", "15", "13", "11", "9"]
    assert keys([page(engine, model, ("state", "failed"), ("job", "7"))]) == ["7"]
    assert keys([page(engine, model, ("state", "failed"), ("job", "25"))]) == []
    assert keys([page(engine, model, ("job", "25"))]) == ["25"]
    with Session(engine) as session:
        counts = count_states(session, parse_filter(columns(model), []))
    assert counts["pending"] == Count(10, is_complete=True)
    if window > 40:
        assert counts["failed"] == Count(20, is_complete=True)
        assert counts["cancelled"] == Count(10, is_complete=True)


# -- what a page costs: as much at the end of a large table as at its beginning, whatever the filter ---------------

ROWS = 30_000
WINDOW = 1000
FILL = """
INSERT INTO row (id, few, many, other, status, priority, run_at, attempts, created_at)
SELECT n, n % 2, n / 10, n % 1000,
       CASE WHEN n % 100 = 0 THEN 'failed' WHEN n > 29000 THEN 'pending' ELSE 'completed' END,
       0, now(), 0, now()
FROM generate_series(1, 30000) n
"""


@pytest.fixture(params=["analyzed", "never analyzed"])
def large(engine: sa.Engine, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    make_window_small(monkeypatch, WINDOW)
    model = created(engine, make_rows())
    execute(engine, "ALTER TABLE row SET (autovacuum_enabled = false)")
    execute(engine, FILL)
    if request.param == "analyzed":
        execute(engine.execution_options(isolation_level="AUTOCOMMIT"), "VACUUM ANALYZE row")
    return model


def cursor(engine: sa.Engine, model: Any, *pairs: tuple[str, str], key: int) -> str:
    with Session(engine) as session:
        source = source_of(columns(model), parse_filter(columns(model), pairs))
        sort = dict(pairs).get("sort", "-id")
        order = orders_of(session, source, source.parts()).by(sort.removeprefix("-"), is_descending=sort[0] == "-")
        values = [sa.cast(each.column, sa.Text()) for each in order.all]
        return cursor_text(order, session.execute(sa.select(*values).where(model.id == key)).one())


@pytest.mark.parametrize("sort", ["id", "-id", "many", "-many", "few", "other"])
def test_every_page_costs_the_same(engine: sa.Engine, large: Any, sort: str) -> None:
    first = cost(engine, large, ("sort", sort))
    middle = cost(engine, large, ("sort", sort), ("after", cursor(engine, large, ("sort", sort), key=15_000)))
    back = cost(engine, large, ("sort", sort), ("before", cursor(engine, large, ("sort", sort), key=15_000)))
    # Of `few`, half of the table is equal: up to a window of a group is counted, and as many rows are walked over.
    limit = WINDOW + 400 if sort == "few" else 300
    for buffers, rows in (first, middle, back):
        assert rows <= limit
        assert buffers <= limit


@pytest.mark.parametrize(
    "pairs",
    [
        [("state", "cancelled")],
        [("error", "ValueError")],
        [("f.other.max", "-1"), ("sort", "many")],
        [("f.few", "1"), ("f.other", "2")],
        [("f.few", "0"), ("state", "failed"), ("sort", "-many")],
        [("f.few.min", "1"), ("state", "cancelled")],
        [("state", "pending"), ("f.other", "-1")],
    ],
)
def test_filter_without_an_index_examines_a_window(engine: sa.Engine, large: Any, pairs: list[tuple[str, str]]) -> None:
    _, rows = cost(engine, large, *pairs)
    assert rows <= 2 * WINDOW + 10


def test_filter_with_an_index_examines_its_rows(engine: sa.Engine, large: Any) -> None:
    for pairs, limit in (
        ([("job", "77")], 2),
        ([("f.other", "7")], 52),
        ([("f.many", "7"), ("f.few", "1")], 30),
        ([("state", "pending"), ("sort", "priority")], 52),
        ([("f.other", "7"), ("f.few", "1"), ("sort", "many")], 120),
        ([("state", "processing")], 0),
        # Half of the table.
        ([("f.few", "1"), ("sort", "-many")], 1070),
        ([("f.few.null", "yes"), ("sort", "-many")], 0),
        ([("state", "other")], 1070),
    ):
        _, rows = cost(engine, large, *pairs)
        assert rows <= limit, pairs


def test_counts_are_capped_and_examine_a_window(engine: sa.Engine, large: Any) -> None:
    with sent_statements(engine) as sent, Session(engine) as session:
        counts = count_states(session, parse_filter(columns(large), []))
    assert counts[None] == Count(CAP, is_complete=False)
    assert counts["pending"] == Count(990, is_complete=True)
    assert counts["processing"] == Count(0, is_complete=True)
    assert counts["failed"] == Count(11, is_complete=False)
    assert counts["cancelled"] == Count(0, is_complete=False)
    assert not counts["cancelled"].is_known
    assert counts["other"] == Count(0, is_complete=False)
    plans = [plan_of(engine, large, *each) for each in sent if "FROM row" in each[0]]
    rows = sum(node["Actual Rows"] for plan in plans for node in nodes_of(plan) if "Relation Name" in node)
    # The pending jobs, and which of them are due: all are.
    assert rows <= CAP + 1 + 2 * 990 + WINDOW + 10
    with Session(engine) as session:
        filtered = count_states(session, parse_filter(columns(large), [("f.many", "7")]))
    assert filtered[None] == Count(10, is_complete=True)
    assert filtered["completed"] == Count(10, is_complete=True)


def test_dead_letters_of_other_queues_are_not_examined(engine: sa.Engine) -> None:
    model = created(engine, make_messages())
    execute(
        engine,
        "INSERT INTO sqlaqueue_dead_letter (queue, key, row, state) "
        "SELECT q, jsonb_build_array(n), jsonb_build_object('id', n), 'failed' "
        "FROM generate_series(1, 2000) n, (VALUES ('a'), ('note'), ('z')) AS queues (q)",
    )
    with sent_statements(engine) as sent:
        found = page(engine, model, ("state", "failed"), ("sort", "id"))
    assert [job.key for job in found.jobs] == [str(number) for number in range(1, 51)]
    plan = plan_of(engine, model, *next(each for each in sent if "jsonb_to_record" in each[0]))
    assert sum(node["Actual Rows"] for node in nodes_of(plan) if node.get("Relation Name")) <= 52
