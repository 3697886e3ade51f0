"""One job that cannot be loaded, or that the database refuses to change, keeps no other from running."""

import enum
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg import sql
from sqlalchemy import event
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import ConcurrencyLimit, QueueConfig, QueueMixin
from sqlaqueue.admin import QueueAdmin, doctor
from sqlaqueue.consumer import claim
from sqlaqueue.consumer.claim import Suspects, Unclaimable
from sqlaqueue.consumer.maintenance import leases
from sqlaqueue.exc import ConfigurationError, WorkerDied
from tests.consumer.bench import Bench, Gate, Server, logged
from tests.consumer.models import Models
from tests.models import sent_statements
from tests.programs import wait_until
from tests.servers import Database
from tests.servers import Server as PostgresServer

GOOD = 12
REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$;
CREATE {kind} TRIGGER refuse {when} ON job {deferrable} FOR EACH ROW WHEN (OLD.note = 'bad') EXECUTE FUNCTION refuse()
"""


class Kind(enum.Enum):
    """The kinds that this version of the program knows."""

    USUAL = "usual"


class Rig(Bench):
    """A queue with one job that stands in the way of the others."""

    def __init__(self, database: Database, strategy: str, api: str, **config: Any) -> None:
        class Base(DeclarativeBase):
            pass

        class Job(QueueMixin, Base):
            __tablename__ = "job"
            __queue__ = QueueConfig(strategy=strategy, **config)
            id: Mapped[int] = mapped_column(primary_key=True)
            kind: Mapped[Kind] = mapped_column(sa.Enum(Kind, native_enum=False, length=10), default=Kind.USUAL)
            note: Mapped[str | None]
            payload: Mapped[Any] = mapped_column(sa.JSON, nullable=True)

        super().__init__(database, strategy, api, made=Models(Base, Job))
        self.create()
        self.ran: list[int] = []
        self.error: Any = None

    def row(self, key: int) -> Any:
        """Return what can be loaded of each row."""
        with self.engine.connect() as connection:
            columns = sa.text("SELECT status, attempts, last_error FROM job WHERE id = :key")
            return connection.execute(columns, {"key": key}).one()

    def count(self, status: str) -> int:
        return int(self.execute("SELECT count(*) FROM job WHERE status = :status", status=status))

    def counted(self) -> int:
        return int(self.execute("SELECT sum(starts) FROM sqlaqueue_crash_journal") or 0)

    async def handle(self, _: Any, job: Any) -> None:
        self.ran.append(job.id)
        if self.error is not None:
            raise ValueError(self.error) if isinstance(self.error, str) else self.error

    def running(self, **options: Any) -> AbstractContextManager[Server]:
        return self.consumer(self.handle, **{"poll_interval": 0.1, "batch_size": 8} | options).running()


Rigs = Callable[..., Rig]


@pytest.fixture
def rigs(database: Database) -> Rigs:
    return partial(Rig, database)


@pytest.fixture
def rig(rigs: Rigs, strategy: str, api: str) -> Rig:
    return rigs(strategy, api)


UNLOADABLE = {
    "enum": "INSERT INTO job (kind) VALUES ('newer')",
    "json": f"INSERT INTO job (kind, payload) VALUES ('USUAL', '{'9' * 5000}')",
}


@pytest.mark.parametrize("what", UNLOADABLE)
def test_a_row_that_cannot_be_loaded(rig: Rig, what: str, log: Any) -> None:
    """It waits, it is named, and a program that can load it runs it."""
    rig.enqueue(GOOD // 2)
    rig.execute(UNLOADABLE[what])
    bad = GOOD // 2 + 1
    rig.enqueue(GOOD // 2)
    with rig.running():
        wait_until(lambda: len(rig.ran) == GOOD)
        assert rig.row(bad)[:2] == ("pending", 0)
        assert [record.job_key for record in logged(log, "job_unclaimable")] == [bad]
        with Session(rig.engine) as session:
            wait_until(lambda: "unclaimable" in _reasons(session, rig.Job, bad))
            found = [finding for finding in doctor(session, rig.Job) if finding.code == "unclaimable_jobs"]
            assert [finding.facts["jobs"][0]["key"] for finding in found] == [str(bad)]
            session.rollback()
    assert sorted(rig.ran) == [key for key in range(1, GOOD + 2) if key != bad]


def _reasons(session: Session, model: Any, key: int) -> list[str]:
    session.rollback()
    return [reason.code for reason in QueueAdmin(session, model).explain(key).reasons]


def test_a_time_that_python_does_not_know(rigs: Rigs, strategy: str) -> None:
    """Psycopg refuses to load it; asyncpg loads it as the first moment that there is."""
    rig = rigs(strategy, "sync")
    rig.enqueue(GOOD)
    rig.execute("INSERT INTO job (kind, run_at) VALUES ('USUAL', '-infinity')")
    rig.enqueue(GOOD)
    with rig.running():
        wait_until(lambda: len(rig.ran) == 2 * GOOD)
    assert rig.row(GOOD + 1)[:2] == ("pending", 0)


def test_many_rows_that_cannot_be_loaded(rig: Rig) -> None:
    """Jobs behind them run all the same, however many they are."""
    rig.execute("INSERT INTO job (kind) SELECT 'newer' FROM generate_series(1, 20)")
    rig.enqueue(GOOD)
    with rig.running(concurrency=3):
        wait_until(lambda: len(rig.ran) == GOOD)
    assert min(rig.ran) == 21


def test_a_corrected_row_runs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unclaimable job is tried again now and then."""
    monkeypatch.setattr(claim, "TRY_AGAIN_AFTER", 0.5)
    rig.execute(UNLOADABLE["enum"])
    rig.enqueue(GOOD)
    with rig.running():
        wait_until(lambda: len(rig.ran) == GOOD)
        rig.execute("UPDATE job SET kind = 'USUAL' WHERE id = 1")
        wait_until(lambda: 1 in rig.ran)


def test_a_quarantined_job_that_cannot_be_loaded(rigs: Rigs, api: str) -> None:
    """The worker of another version has died, and this one meets its job among those that it claims apart."""
    rig = rigs("update_status", api)
    rig.enqueue(2)
    rig.execute("UPDATE job SET lease_token = gen_random_uuid()", "UPDATE job SET kind = 'newer' WHERE id = 1")
    rig.enqueue(GOOD)
    with rig.running():
        wait_until(lambda: len(rig.ran) == GOOD + 1)
    assert 2 in rig.ran


REFUSALS = {
    "check": "ALTER TABLE job ADD CONSTRAINT good CHECK (note IS DISTINCT FROM 'bad') NOT VALID",
    "trigger": REFUSE.format(body="RAISE EXCEPTION 'no';", kind="", when="BEFORE UPDATE", deferrable=""),
    "deferred": REFUSE.format(
        body="RAISE EXCEPTION 'no';", kind="CONSTRAINT", when="AFTER UPDATE", deferrable="DEFERRABLE INITIALLY DEFERRED"
    ),
}


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("bad", [1, GOOD + 1])
def test_a_row_whose_claim_is_refused(rigs: Rigs, api: str, refusal: str, bad: int, log: Any) -> None:
    rig = rigs("update_status", api)
    rig.enqueue(bad - 1)
    rig.execute("INSERT INTO job (kind, note) VALUES ('USUAL', 'bad')", REFUSALS[refusal])
    rig.enqueue(GOOD)
    with rig.running():
        wait_until(lambda: len(rig.ran) == GOOD + bad - 1)
        wait_until(lambda: logged(log, "job_unclaimable"))
    assert rig.row(bad)[:2] == ("pending", 0)
    assert rig.ran.count(bad) == 0


def test_a_claim_under_flow_control_is_searched_as_well(rigs: Rigs, api: str) -> None:
    rig = rigs("update_status", api, flow_control=[ConcurrencyLimit(8)])
    rig.execute("INSERT INTO job (kind, note) VALUES ('USUAL', 'bad')", REFUSALS["check"], UNLOADABLE["enum"])
    rig.enqueue(GOOD)
    with rig.running(concurrency=4):
        wait_until(lambda: len(rig.ran) == GOOD)


def test_a_count_of_attempts_that_overflows_fails_its_job(rigs: Rigs, api: str) -> None:
    """The claim itself cannot be written, whoever tries, so waiting would not help."""
    rig = rigs("update_status", api)
    rig.execute("INSERT INTO job (kind, attempts) VALUES ('USUAL', 2147483647)")
    rig.enqueue(GOOD)
    with rig.running() as server:
        wait_until(lambda: len(rig.ran) == GOOD and rig.row(1).status == "failed")
        wait_until(lambda: server.told("failed") == [1])
    assert "out of range" in rig.row(1).last_error


@pytest.mark.parametrize("strategy", ["batch_select", "delete_returning"])
def test_a_count_of_attempts_that_cannot_be_written_fails_its_job(rigs: Rigs, api: str, strategy: str) -> None:
    """A strategy that holds a transaction counts when it settles."""
    rig = rigs(strategy, api)
    rig.execute("INSERT INTO job (kind, attempts) VALUES ('USUAL', 2147483647)")
    rig.enqueue(GOOD)
    with rig.running():
        wait_until(lambda: rig.count("completed") == GOOD and rig.row(1).status == "failed")
    assert "out of range" in rig.row(1).last_error


@pytest.mark.few(1)
@pytest.mark.parametrize("state", ["22003", "22012", "P0001"])
@pytest.mark.parametrize("strategy", ["update_status", "batch_select"])
def test_an_error_of_all_rows_fails_no_job(
    rigs: Rigs, api: str, strategy: str, state: str, log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a mistake in a trigger. They wait until it is mended, and are tried again."""
    monkeypatch.setattr(claim, "TRY_AGAIN_AFTER", 1.0)
    rig = rigs(strategy, api, max_attempts=1000)
    rig.enqueue(GOOD)
    rig.execute(
        f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{state}'; END $$",
        "CREATE TRIGGER refuse BEFORE UPDATE ON job FOR EACH ROW WHEN (NEW.status <> 'failed') "
        "EXECUTE FUNCTION refuse()",
    )
    with rig.running():
        wait_until(lambda: len(logged(log, "job_unclaimable")) >= GOOD // 2)
        assert rig.count("pending") == GOOD
        rig.execute("DROP TRIGGER refuse ON job")
        wait_until(lambda: rig.count("completed") == GOOD)


def test_an_error_of_connecting_costs_no_attempt(rigs: Rigs, strategy: str) -> None:
    """A hook may raise anything, such as when it asks for a password, and the run that is settled is not its cause."""
    rig = rigs(strategy, "sync")
    failures: list[str] = []

    def fail(*_: Any) -> None:
        if failures:
            raise ValueError(failures.pop())

    async def handle(_: Any, job: Any) -> None:
        rig.ran.append(job.id)
        if len(rig.ran) == 1:
            failures.extend(["no password"] * 5)

    rig.enqueue(1)
    server = rig.consumer(handle, engine={"poolclass": sa.NullPool})
    event.listen(server.engine, "do_connect", fail)
    with server.running():
        wait_until(lambda: rig.count("completed") == 1)
    assert rig.row(1).attempts == 1
    assert rig.ran == [1]


def test_a_job_whose_earlier_handler_goes_on_is_not_claimed_in_a_loop(rigs: Rigs) -> None:
    """Without ``run_at`` it cannot be put off in the table."""
    rig, gate = rigs("update_status", "sync", columns={"run_at": None}), Gate()
    rig.enqueue(1)
    with rig.consumer(gate, timeout=0.2, concurrency=3, retry=lambda *_: 0).running() as server:
        wait_until(lambda: server.told("released"))
        time.sleep(2)
        assert server.told("released") == [1]
        gate.open()
    assert gate.calls == 1


def test_the_search_takes_few_claims(rigs: Rigs) -> None:
    """One for each halving of the batch, and one more."""
    rig = rigs("update_status", "sync")
    rig.enqueue(15)
    rig.execute(UNLOADABLE["enum"])
    # With batch=True a claim has this size at once.
    server = rig.consumer(batch_size=16, batch=True)
    with sent_statements(server.engine) as sent:
        assert server.drain() == 15
    # The first claim, four halvings, the last row by itself, and one that finds the queue empty.
    assert len([text for text, _ in sent if "UPDATE job SET status='processing'" in text]) <= 1 + 4 + 1 + 1


def test_suspects_are_divided_until_one_is_left() -> None:
    """Pure: each group contains the bad one or not."""
    for size in range(1, 40):
        for bad in range(size):
            search, claims = Unclaimable(), 0
            search.suspect([(key,) for key in range(size)])
            claimed: set[int] = set()
            while (suspects := search.take()) is not None:
                claims += 1
                keys = {key for (key,) in suspects.keys}
                if bad in keys:
                    search.failed(suspects, "no")
                else:
                    search.succeeded(suspects, found=True)
                    claimed |= keys
            assert claimed == set(range(size)) - {bad}
            assert [job.key for job in search.jobs()] == [(bad,)]
            assert search.excluded() == [(bad,)]


def test_an_unclaimable_job_is_due_again_after_a_while() -> None:
    now = 0.0
    search = Unclaimable(lambda: now)
    search.suspect([(1,)])
    suspects = search.take()
    assert suspects is not None
    assert search.failed(suspects, "no") is not None
    assert search.take() is None
    now = claim.TRY_AGAIN_AFTER + 1
    again = search.take()
    assert again is not None
    # It is known already, and not to be logged again.
    assert search.failed(again, "no") is None
    now *= 2
    again = search.take() or search.take()
    search.succeeded(again, found=True)
    assert not search


def test_suspects_whose_claim_has_ended_otherwise_are_claimed_again() -> None:
    """Such as by a lost connection, or by the end of the task."""
    search = Unclaimable()
    search.suspect([(key,) for key in range(4)])
    suspects = search.take()
    search.end(suspects)
    assert search.is_searching
    taken = set()
    while (again := search.take()) is not None:
        taken |= {key for (key,) in again.keys}
        search.succeeded(again, found=True)
        search.end(again)
    assert taken == {0, 1, 2, 3}
    assert not search


def test_usual_claims_go_on_between_the_tries_of_known_jobs() -> None:
    now = 0.0
    search = Unclaimable(lambda: now)
    for key in range(300):
        search.suspect([(key,)])
        search.failed(search.take() or Suspects([]), "no")
    now = 10 * claim.TRY_AGAIN_AFTER
    tries = []
    for _ in range(20):
        suspects = search.take()
        tries.append(suspects is not None)
        if suspects is not None:
            search.failed(suspects, "no")
    assert tries == [True, False] * 10


MESSAGES = "sqlaqueue_message_job"


def keep_bad_rows(rig: Rig, strategy: str, number: int) -> str:
    """Enqueue jobs whose rows a claim leaves as they are, without an error; return the table of the trigger."""
    rig.execute(f"INSERT INTO job (kind, note) SELECT 'USUAL', 'bad' FROM generate_series(1, {number})")
    table, condition = ("job", "OLD.note = 'bad'") if strategy == "update_status" else (MESSAGES, f"OLD.id <= {number}")
    change = "UPDATE" if strategy == "update_status" else "DELETE"
    rig.execute(
        "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$",
        f"CREATE TRIGGER keep BEFORE {change} ON {table} FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION keep()",
    )
    return table


@pytest.mark.parametrize("strategy", ["update_status", "delete_returning"])
def test_a_row_that_stays_as_it_is(
    rigs: Rigs, api: str, strategy: str, log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trigger raises no error, and the only handler's claim takes one of these rows each time."""
    monkeypatch.setattr(leases, "TRY_AGAIN_AFTER", 1.0)
    rig = rigs(strategy, api)
    table = keep_bad_rows(rig, strategy, 3)
    rig.enqueue(GOOD)

    def logged() -> int:
        return sum("leaves its row as it is" in record.getMessage() for record in log.records)

    with rig.running():
        wait_until(lambda: len(rig.ran) == GOOD)
        wait_until(lambda: logged() == 3)
        rig.enqueue(GOOD)
        wait_until(lambda: len(rig.ran) == 2 * GOOD)
        assert not {1, 2, 3} & set(rig.ran)
        rig.execute(f"DROP TRIGGER keep ON {table}")
        wait_until(lambda: len(rig.ran) == 2 * GOOD + 3)
    assert logged() == 3


@pytest.mark.parametrize(("concurrency", "config"), [(1, {}), (2, {}), (2, {"flow_control": [ConcurrencyLimit(2)]})])
@pytest.mark.parametrize("strategy", ["update_status", "delete_returning"])
def test_rows_that_stay_as_they_are_do_not_end_a_drain(
    rigs: Rigs, strategy: str, concurrency: int, config: dict[str, Any]
) -> None:
    """They fill each claim, which then returns no job; nor do they keep it from ending."""
    rig = rigs(strategy, "sync", **config)
    keep_bad_rows(rig, strategy, 9)
    rig.enqueue(GOOD)
    rig.consumer(rig.handle, batch_size=3, concurrency=concurrency).drain()
    assert sorted(rig.ran) == list(range(10, 10 + GOOD))


EXPIRE = """
UPDATE job SET status = 'processing', attempts = 1, lease_token = gen_random_uuid(),
    lease_expires_at = now() - interval '1 minute'
"""


@pytest.mark.parametrize("refusal", ["check", "trigger"])
def test_a_row_whose_rescue_is_refused(rigs: Rigs, api: str, refusal: str, log: Any) -> None:
    rig = rigs("update_status", api)
    rig.enqueue(GOOD)
    rig.execute("INSERT INTO job (kind, note) VALUES ('USUAL', 'bad')", EXPIRE, REFUSALS[refusal])
    with rig.running(concurrency=4):
        wait_until(lambda: len(rig.ran) == GOOD)
        wait_until(lambda: any("cannot be rescued" in record.getMessage() for record in log.records))
        with Session(rig.engine) as session:
            wait_until(lambda: "unclaimable" in _reasons(session, rig.Job, GOOD + 1))
    assert rig.row(GOOD + 1)[0] == "processing"


def test_a_job_that_fails_when_it_is_rescued_is_reported_as_failed(rigs: Rigs, api: str, log: Any) -> None:
    """Alerts look for failed jobs, whatever has ended their last attempt."""
    rig = rigs("update_status", api, max_attempts=1)
    rig.enqueue(1)
    rig.execute(EXPIRE)
    with rig.running() as server:
        wait_until(lambda: rig.row(1).status == "failed")
        wait_until(lambda: server.told("failed", "completed") == [1])
    (event,) = [event for event in server.events if event.name == "failed"]
    assert (event.attempt, event.max_attempts, type(event.error)) == (1, 1, WorkerDied)
    assert [record.levelname for record in logged(log, "failed")] == ["ERROR"]


REFUSED = "SELECT last_value FROM refused"


@pytest.mark.parametrize("refusal", ["RAISE EXCEPTION 'no'", "RETURN NULL"])
@pytest.mark.parametrize("strategy", ["batch_select", "delete_returning"])
def test_an_end_that_the_database_refuses(
    rigs: Rigs, api: str, strategy: str, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handler runs as often as attempts are allowed, and in batches that were rolled back; then no more."""
    monkeypatch.setattr(claim, "TRY_AGAIN_AFTER", 0.2)
    rig = rigs(strategy, api, max_attempts=2)
    body = f"PERFORM nextval('refused'); {refusal};"
    rig.execute(
        "INSERT INTO job (kind, note) VALUES ('USUAL', 'bad')",
        "CREATE SEQUENCE refused",
        REFUSE.format(body=body, kind="", when="BEFORE UPDATE", deferrable=""),
    )
    rig.enqueue(GOOD)

    def runs_no_more() -> bool:
        """Return whether its end is tried again and again while its handler is not called."""
        runs, refused = rig.ran.count(1), rig.execute(REFUSED)
        # After one run a few tries are refused: with others of its batch, with fewer, and alone.
        wait_until(lambda: rig.execute(REFUSED) > refused + 10)
        return rig.ran.count(1) == runs

    with rig.running(concurrency=2):
        wait_until(lambda: len(set(rig.ran)) == GOOD + 1)
        with Session(rig.engine) as session:
            wait_until(lambda: "unclaimable" in _reasons(session, rig.Job, 1))
        wait_until(lambda: rig.counted() >= 2)
        # Later tries write the end, and call no handler.
        wait_until(runs_no_more)
        runs = rig.ran.count(1)
        rig.enqueue(GOOD)
        wait_until(lambda: len(set(rig.ran)) == 2 * GOOD + 1)
    # How many batches were rolled back depends on the machine.
    assert rig.ran.count(1) == runs
    assert rig.row(1)[:2] == ("pending", 0)


@pytest.fixture(scope="module")
def latin1_database(server: PostgresServer) -> Iterator[Database]:
    name = f"latin1_{uuid.uuid4().hex[:8]}"
    encoding = "ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {} " + encoding).format(sql.Identifier(name)))
        yield Database(server, name)
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def latin1(latin1_database: Database) -> Iterator[Database]:
    yield latin1_database
    with latin1_database.connect() as connection:
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")


@pytest.mark.parametrize("kept", [None, timedelta(days=1)])
def test_an_error_that_the_database_cannot_store(
    latin1: Database, strategy: str, api: str, kept: timedelta | None
) -> None:
    rig = Rig(latin1, strategy, api, max_attempts=1, attempt_history=kept)
    rig.error = "3 €"
    rig.enqueue(GOOD)
    with rig.running(concurrency=2):
        wait_until(lambda: rig.count("failed") == GOOD)
    assert sorted(set(rig.ran)) == list(range(1, GOOD + 1))
    assert rig.row(1)[2].splitlines()[0] == "ValueError: 3 \\u20ac"
    if kept is not None:
        with rig.engine.connect() as connection:
            texts = {
                each.splitlines()[0] for each in connection.scalars(sa.text("SELECT error FROM sqlaqueue_attempt"))
            }
        assert texts == {"ValueError: 3 \\u20ac"}


def test_an_error_that_the_database_cannot_store_behind_a_lock(latin1: Database, api: str) -> None:
    """The run is settled when the row is free, by the maintenance."""
    rig = Rig(latin1, "update_status", api, max_attempts=1)
    [key] = rig.enqueue(1)
    with rig.engine.connect() as other:

        async def handle(_: Any, __: Any) -> None:
            other.execute(sa.text("SELECT FROM job WHERE id = :key FOR UPDATE"), {"key": key})
            raise ValueError("3 €")

        with rig.consumer(handle, poll_interval=0.1).running() as server:
            wait_until(lambda: server.context and server.context.completions.postponed._runs)
            other.rollback()
            wait_until(lambda: rig.count("failed") == 1)
    assert rig.row(key)[2].splitlines()[0] == "ValueError: 3 \\u20ac"


@pytest.mark.parametrize("name", ["€", "ü"])
def test_a_name_that_the_database_cannot_store(latin1: Database, api: str, name: str) -> None:
    """It would let each claim fail, so it is refused at the start; one that can be stored works."""
    rig = Rig(latin1, "update_status", api)
    rig.enqueue(1)
    if name == "ü":
        with rig.running(worker_name=name):
            wait_until(lambda: rig.ran == [1])
        return
    with pytest.raises(ConfigurationError, match=r"cannot store the name '.*:€', by its encoding; give worker_name="):
        rig.consumer(rig.handle, worker_name=name).drain()
    assert rig.row(1)[:2] == ("pending", 0)


class _Meta(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override] # a class whose name raises
        raise SystemExit


class _NoAttributes(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise SystemExit


class _NoName(Exception, metaclass=_Meta):
    pass


class _NoText(Exception):
    def __str__(self) -> str:
        raise SystemExit


UNREADABLE = {"attributes": _NoAttributes, "name": _NoName, "text": _NoText}


@pytest.mark.parametrize("what", UNREADABLE)
def test_an_exception_that_cannot_be_read(rig: Rig, what: str) -> None:
    """It fails its attempt like any other one."""
    rig.error = UNREADABLE[what]()
    rig.enqueue(3)
    with rig.running():
        wait_until(lambda: all(rig.row(key).attempts == 1 for key in (1, 2, 3)))
        wait_until(lambda: all(rig.row(key).last_error for key in (1, 2, 3)))
    # Python itself meets the SystemExit of an attribute, on its way to the Consumer.
    expected = "SystemExit" if what == "attributes" else "RuntimeError"
    assert {rig.row(key).last_error.partition(":")[0] for key in (1, 2, 3)} == {expected}


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")
@pytest.mark.parametrize("how", ["connection", "pooled", "driver"])
@pytest.mark.parametrize("strategy", ["batch_select", "delete_returning"])
def test_a_handler_that_closes_the_connection_of_its_batch(rigs: Rigs, strategy: str, how: str) -> None:
    """It fails, and the other jobs of the batch complete after a few runs."""
    rig = rigs(strategy, "sync", max_attempts=2)
    rig.enqueue(10)

    async def close(io: Any, job: Any) -> None:
        rig.ran.append(job.id)
        if job.id == 3:
            connection = io.session.connection()
            fairy = connection.connection
            {"connection": connection, "pooled": fairy, "driver": fairy.dbapi_connection}[how].close()

    with rig.consumer(close, retry=lambda *_: 0.1).running():
        wait_until(lambda: rig.count("completed") == 9 and rig.count("failed") == 1)
    assert rig.row(3).status == "failed"
    assert max(rig.ran.count(key) for key in range(1, 11)) <= 6


@pytest.mark.parametrize("moment", ["infinity", "-infinity", "20000-01-01"])
@pytest.mark.parametrize("column", ["run_at", "created_at"])
def test_operators_read_times_that_python_does_not_know(rigs: Rigs, strategy: str, column: str, moment: str) -> None:
    """One row must not hide the others: psycopg refuses to load such a time."""
    rig = rigs(strategy, "sync")
    rig.enqueue(3)
    rig.execute(f"UPDATE job SET {column} = '{moment}' WHERE id = 2")
    with Session(rig.engine) as session:
        admin = QueueAdmin(session, rig.Job)
        assert {info.key for info in admin.jobs()} == {1, 2, 3}
        assert admin.job(1) is not None
        info, values = admin.job(2) or (None, {})
        assert info is not None
        assert values[column].startswith(moment)
        assert admin.explain(2).reasons
        assert admin.stats()
        assert admin.depth().pending == 3
        assert "check_failed" not in {finding.code for finding in doctor(session, rig.Job)}
