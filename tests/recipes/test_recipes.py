"""Each recipe of the documentation does what it says: the code is run that a reader would paste."""

import json
import re
import signal
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import claim, complete
from tests.docs.pages import ROOT, SNIPPET
from tests.programs import Program, run_program, wait_until
from tests.recipes.conftest import MakeSystem, Recipe
from tests.servers import Database, Server


def once(jobs: range | set[int]) -> Counter[int]:
    return Counter(dict.fromkeys(jobs, 1))


# -- a job table and a message table -------------------------------------------------------------------------------


def test_message_table(make_system: MakeSystem) -> None:
    system = make_system("message-table")
    system.execute("INSERT INTO jobs (status) SELECT 'new_waiting' FROM generate_series(1, 30)")
    system.execute("INSERT INTO jobs (status) VALUES ('new'), ('complete')")
    # Some messages name a job that does not exist, is not pending, or has another message.
    system.execute("INSERT INTO message_queue (target_id) VALUES (31), (99)")
    system.execute("INSERT INTO message_queue (target_id) SELECT n FROM generate_series(30, 1, -1) AS n")
    system.execute("INSERT INTO message_queue (target_id) VALUES (5), (98), (32)")
    system.execute("INSERT INTO message_queue (target_id, status) VALUES (97, 'held')")

    def done() -> bool:
        (waiting,) = system.execute("SELECT count(*) FROM jobs WHERE status = 'new_waiting'")
        return waiting == (0,)

    system.kill_one_of_two(done, hold=3)
    assert system.effects() == once(range(1, 31))
    assert system.execute("SELECT status, attempts, count(*) FROM jobs GROUP BY 1, 2 ORDER BY 1, 2") == [
        ("complete", 0, 1),
        ("complete", 1, 30),
        ("new", 0, 1),
    ]
    system.program().consumer.drain()
    assert system.execute("SELECT target_id, status FROM message_queue") == [(97, "held")]
    assert system.execute("SELECT * FROM sqlaqueue_crash_journal") == []


def test_message_table_in_order_and_again(make_system: MakeSystem, caplog: pytest.LogCaptureFixture) -> None:
    system = make_system("message-table")
    program = system.program()
    system.execute("INSERT INTO jobs (status) SELECT 'new_waiting' FROM generate_series(1, 4)")
    system.execute(
        "INSERT INTO message_queue (target_id, created) VALUES (99, now() - interval '1 h'), (1, now()),"
        " (2, now() - interval '2 h'), (4, now() - interval '3 h'), (98, now() - interval '5 h')"
    )
    run: list[int] = []

    def process(session: Session, job: object) -> None:
        run.append(job.id)
        if job.id == 2:
            raise ValueError("bad")

    program.consumer._handler = process
    # Messages without a pending job come first and in between. They do not end the drain, and the log names them.
    assert program.consumer.drain() == 3
    assert run == [4, 2, 1]
    assert {key in caplog.text for key in ("98", "99")} == {True}
    assert system.execute("SELECT count(*) FROM message_queue") == [(0,)]
    assert system.execute("SELECT id, status, attempts FROM jobs ORDER BY id") == [
        (1, "complete", 1),
        (2, "failed", 1),
        (3, "new_waiting", 0),
        (4, "complete", 1),
    ]
    # Requeued by hand up to the fourth attempt, and once more.
    for attempts in range(2, 6):
        system.execute("UPDATE jobs SET status = 'new_waiting' WHERE id = 2")
        system.execute("INSERT INTO message_queue (target_id) VALUES (2)")
        assert program.consumer.drain() == 1
        assert system.execute("SELECT status, attempts FROM jobs WHERE id = 2") == [("failed", attempts)]


def test_message_table_with_a_job_that_kills_its_worker(make_system: MakeSystem) -> None:
    system = make_system("message-table")
    system.execute("INSERT INTO jobs (status) SELECT 'new_waiting' FROM generate_series(1, 9)")
    system.execute("INSERT INTO message_queue (target_id) SELECT n FROM generate_series(1, 9) AS n")
    left = "SELECT id, status, attempts FROM jobs WHERE status <> 'complete' OR attempts <> 1"
    # The whole batch may be claimed, and die, once before the responsible job is known.
    assert system.kill_by_job(3, lambda: system.execute(left) == [(3, "failed", 4)]) in {4, 5}
    assert system.effects() == once(set(range(1, 10)) - {3})


# -- a table whose rows are the messages -----------------------------------------------------------------------------


def test_rows_as_messages(make_system: MakeSystem) -> None:
    system = make_system("rows-as-messages")
    system.execute("INSERT INTO queue (itemid) SELECT x FROM generate_series(1, 20) AS x")
    held = system.kill_one_of_two(lambda: system.execute("SELECT count(*) FROM queue") == [(0,)], hold=3)
    # Items are claimed in order: the worker was killed in its third one.
    assert held == 3
    assert system.effects() == once(set(range(1, 21)) - {13})
    assert system.execute("SELECT key, state FROM sqlaqueue_dead_letter") == [([13], "failed")]
    assert system.execute("SELECT * FROM sqlaqueue_crash_journal") == []


def test_rows_as_messages_with_one_that_kills_its_worker(make_system: MakeSystem) -> None:
    system = make_system("rows-as-messages")
    system.execute("INSERT INTO queue (itemid) SELECT x FROM generate_series(1, 9) AS x")
    assert system.kill_by_job(3, lambda: system.execute("SELECT count(*) FROM queue") == [(0,)]) == 5
    assert system.effects() == once(set(range(1, 10)) - {3})
    assert system.execute("SELECT key, state FROM sqlaqueue_dead_letter") == [([3], "failed")]


def test_rows_as_messages_are_back_after_a_rollback(make_system: MakeSystem) -> None:
    system = make_system("rows-as-messages")
    program = system.program()
    system.execute("INSERT INTO queue (itemid, is_done) SELECT x, x = 2 FROM generate_series(1, 20) AS x")
    with Session(program.engine) as one, Session(program.engine) as other:
        assert [item.itemid for item in one.scalars(claim(program.Item, 2))] == [1, 2]
        (third,) = other.scalars(claim(program.Item, 1))
        assert third.itemid == 3
        one.rollback()
        other.execute(complete(third))
        other.commit()
    rows = system.execute("SELECT itemid, is_done FROM queue ORDER BY itemid")
    assert rows == [(x, x == 2) for x in range(1, 21) if x != 3]


# -- a table with only a status column -----------------------------------------------------------------------------


def test_status_column(make_system: MakeSystem) -> None:
    system = make_system("status-column")
    system.execute(system.recipe.existing[1])
    theirs, mine = set(range(3, 21, 3)), {n for n in range(1, 21) if n % 3}
    # Without a lease the dead worker's job is not rescued.
    held = system.kill_one_of_two(lambda: len(system.effects()) == len(mine) - 1, hold=2)
    assert system.effects() == once(mine - {held})
    processing = "SELECT id FROM jobs WHERE status = 'processing' ORDER BY id"
    assert {n for (n,) in system.execute(processing)} == theirs | {held}
    system.execute(f"UPDATE jobs SET status = 'pending' WHERE id = {held}")
    assert system.program().consumer.drain() == 1
    assert system.execute("SELECT id, status FROM jobs ORDER BY id") == [
        (n, "processing" if n in theirs else "completed") for n in range(1, 21)
    ]


def test_status_column_two_open_transactions_take_different_rows(make_system: MakeSystem) -> None:
    system = make_system("status-column")
    system.execute(system.recipe.existing[1])
    program = system.program()
    with Session(program.engine) as one, Session(program.engine) as other:
        other.execute(sa.text("SET lock_timeout = '1ms'"))
        (first,) = one.scalars(claim(program.Job, 1))
        (second,) = other.scalars(claim(program.Job, 1))
        assert (first.id, first.status, second.id, second.status) == (1, "processing", 2, "processing")
        one.commit()
        other.commit()
        assert one.scalars(complete(first)).all() == [1]
        one.commit()


# -- a worker script -------------------------------------------------------------------------------------------------


def test_worker_script(make_system: MakeSystem) -> None:
    system = make_system("worker-script", time_zone="America/New_York")
    system.execute(
        "INSERT INTO jobs (job_data, job_status) SELECT 'hello world ' || n, 'pending' FROM generate_series(0, 19) AS n"
    )
    system.execute("INSERT INTO jobs (job_data, job_status, attempts, run_at) VALUES ('nulls', 'pending', NULL, NULL)")
    system.execute("INSERT INTO jobs (job_data, job_status) VALUES ('not a job', NULL), ('done', 'success')")
    done = "SELECT count(*) FROM jobs WHERE job_status = 'pending'"
    system.kill_one_of_two(lambda: system.execute(done) == [(0,)], hold=3)
    assert system.effects() == once(range(1, 22))
    assert system.execute("SELECT job_status, attempts, count(*) FROM jobs GROUP BY 1, 2 ORDER BY 1, 2") == [
        ("success", 0, 1),
        ("success", 1, 21),
        (None, 0, 1),
    ]
    assert system.execute("SELECT * FROM sqlaqueue_crash_journal") == []


def test_worker_script_attempts_and_delays_in_new_york(make_system: MakeSystem) -> None:
    system = make_system("worker-script", time_zone="America/New_York")
    program = system.program()
    system.execute("INSERT INTO jobs (job_data, job_status) VALUES ('bad', 'pending'), ('good', 'pending')")
    assert system.execute("SHOW timezone") == [("America/New_York",)]
    wait = "SELECT extract(epoch FROM run_at - updated_at)::float8 FROM jobs WHERE job_id = 1"
    for attempt in (1, 2):
        assert program.consumer.drain() == 3 - attempt
        assert system.execute("SELECT job_status, attempts FROM jobs WHERE job_id = 1") == [("pending", attempt)]
        # updated_at is the start of the transaction that has run the batch, on the same clock.
        ((seconds,),) = system.execute(wait)
        assert 5 <= seconds < 60
        assert program.consumer.drain() == 0
        system.execute("UPDATE jobs SET run_at = run_at - interval '60 s'")
    assert program.consumer.drain() == 1
    first_line = "split_part(last_error, E'\\n', 1)"
    ended = f"SELECT job_status, attempts, {first_line}, updated_at > created_at FROM jobs WHERE job_id = 1"
    assert system.execute(ended) == [("failed", 3, "ValueError: bad data", True)]
    # Again by plain SQL, from a session of the same zone: one more run each time.
    for attempts in (4, 5):
        system.execute("UPDATE jobs SET job_status = 'pending' WHERE job_status = 'failed'")
        assert program.consumer.drain() == 1
        assert system.execute(ended) == [("failed", attempts, "ValueError: bad data", True)]


def test_worker_script_takes_five_under_one_lock(make_system: MakeSystem) -> None:
    system = make_system("worker-script", time_zone="America/New_York")
    program = system.program()
    system.execute("INSERT INTO jobs (job_data, job_status) SELECT 'x', 'pending' FROM generate_series(1, 7)")
    sizes: list[int] = []
    free = "SELECT count(*) FROM (SELECT FROM jobs WHERE job_status = 'pending' FOR UPDATE SKIP LOCKED) AS free"

    def task(session: Session, job: object) -> None:
        sizes.append(system.execute(free)[0][0])

    program.consumer._handler = task
    assert program.consumer.drain() == 7
    assert sizes == [2] * 5 + [0] * 2


# -- the SQL that a recipe shows is the SQL that its model needs ---------------------------------------------------

RECIPES = ["message-table", "rows-as-messages", "status-column", "worker-script"]
OBJECTS = """
    SELECT 'column', c.oid::regclass::text, attname::text, format_type(atttypid, atttypmod), attnotnull,
        pg_get_expr(adbin, adrelid)
    FROM pg_class AS c JOIN pg_attribute ON attrelid = c.oid LEFT JOIN pg_attrdef ON adrelid = c.oid AND adnum = attnum
    WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' AND attnum > 0 AND relname <> 'effect'
    UNION ALL
    SELECT 'index', tablename, indexname, indexdef, NULL, NULL FROM pg_indexes WHERE schemaname = 'public'
    UNION ALL
    SELECT 'trigger', tgrelid::regclass::text, tgname, NULL, NULL, NULL FROM pg_trigger
"""


def objects(database: Database) -> set[Any]:
    with database.connect() as connection:
        return set(connection.execute(OBJECTS).fetchall())


@pytest.mark.once
@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_adds_what_the_model_needs(
    make_system: MakeSystem, name: str, database: Database, server: Server
) -> None:
    make_system(name)
    with server.database() as fresh:
        program = Recipe(name).program(fresh.url())
        program.Base.metadata.create_all(program.engine)
        program.engine.dispose()
        assert objects(fresh) == objects(database)


@pytest.mark.once
def test_no_recipe_is_forgotten() -> None:
    pages = {page.stem for page in (ROOT / "docs" / "recipes").glob("*.md")}
    assert pages == {*RECIPES, "errors-and-logs", "flask", "web-servers"}


# -- the recipe for web servers, run as it is written: a real server starts, does a job and ends in order ----------

PAGE = (ROOT / "docs" / "recipes" / "web-servers.md").read_text()
SECTIONS = {section.partition("\n")[0]: section for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)}
QUEUE, ASYNCIO = "The queue", "The Consumer for FastAPI, Starlette and Litestar"
RUN_AS_A_TASK = """
import asyncio, json

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        task = asyncio.create_task(consumer.run())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        consumer.stop()
        await task
        await engine.dispose()
        await send({"type": "lifespan.shutdown.complete"})
    else:
        key = int(scope["path"].rpartition("/")[2]) if scope["method"] == "GET" else None
        said = await (enqueue("ada") if key is None else status_of(key))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(said).encode()})
"""
"""A server whose lifespan runs the Consumer as a task; the server handles the signal, and stops the Consumer."""


def blocks(section: str, database: Database) -> list[str]:
    found = [match[3] for match in SNIPPET.finditer(SECTIONS[section]) if match[2] == "python"]
    for driver in ("psycopg", "asyncpg"):
        url = repr(database.url(driver))  # type: ignore[arg-type] # one of the drivers
        found = [code.replace(f'"postgresql+{driver}://localhost/app"', url) for code in found]
    return found


def write_app(path: Path, section: str, database: Database) -> list[str]:
    """Write the files of a section, and return the command that serves them."""
    (queue,), asyncio = blocks(QUEUE, database), blocks(ASYNCIO, database)
    if section == "Flask":
        app, hooks = blocks(section, database)
        (path / "gunicorn.conf.py").write_text(hooks)
        (path / "app.py").write_text(queue + app)
        return ["gunicorn", "--bind"]
    app = RUN_AS_A_TASK if section == "run()" else "".join(blocks(section, database))
    (path / "app.py").write_text(queue + "".join(asyncio) + app)
    return ["uvicorn", "--port"]


def ask(port: int, path: str, method: str = "GET") -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310 - as above
        return json.load(response)


def create_tables(section: str, database: Database) -> None:
    namespace: dict[str, Any] = {}
    exec(compile(blocks(QUEUE, database)[0], "queue", "exec", dont_inherit=True), namespace)  # noqa: S102 - the recipe's
    engine = sa.create_engine(database.url())
    namespace["Base"].metadata.create_all(engine)
    engine.dispose()


@pytest.mark.once
@pytest.mark.parametrize("section", ["FastAPI", "Starlette", "Litestar", "Flask", "run()"])
def test_a_server_does_jobs_and_ends_in_order(
    section: str, database: Database, tmp_path: Path, unused_tcp_port: int
) -> None:
    create_tables(section, database)
    program, option = write_app(tmp_path, section, database)
    address = f"127.0.0.1:{unused_tcp_port}" if program == "gunicorn" else str(unused_tcp_port)
    server = Program(program, "app:app", option, address, directory=tmp_path)

    def starts() -> bool:
        assert server.code is None, server.output
        try:
            return ask(unused_tcp_port, "/emails/0") == {"status": None}
        except (urllib.error.URLError, ConnectionError):
            return False

    try:
        wait_until(starts, "a server that answers", seconds=120)
        key = ask(unused_tcp_port, "/emails?to=ada@example.com", "POST")["id"]
        wait_until(lambda: ask(unused_tcp_port, f"/emails/{key}") == {"status": "completed"})
        with database.connect() as connection:
            # Its first heartbeat may come after the job.
            wait_until(lambda: count_consumers(connection) == 1)
        server.signal()
        code = server.end()
    finally:
        server.clear()
    # uvicorn ends by the signal that it was sent, after everything else.
    assert code == (0 if program == "gunicorn" else -signal.SIGTERM), server.output
    if program == "uvicorn":
        assert "Application shutdown complete" in server.output
    assert "Traceback" not in server.output
    with database.connect() as connection:
        assert count_consumers(connection) == 0


@pytest.mark.once
def test_a_server_without_its_tables_does_not_start(database: Database, tmp_path: Path, unused_tcp_port: int) -> None:
    program, option = write_app(tmp_path, "Starlette", database)
    done = run_program(program, "app:app", option, str(unused_tcp_port), directory=tmp_path)
    assert done.returncode == 3
    assert "DatabaseNotReadyError" in done.stderr
    assert "Application startup failed" in done.stderr


def count_consumers(connection: psycopg.Connection) -> int:
    (row,) = connection.execute("SELECT count(*) FROM sqlaqueue_consumer").fetchall()
    return int(row[0])
