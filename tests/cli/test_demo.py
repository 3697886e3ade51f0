"""``sqlaqueue demo`` as a user runs it, with real files, workers and kills; it leaves nothing behind."""

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session
from sqlalchemy.schema import CreateSchema

from sqlaqueue import Fail
from sqlaqueue.cli import main
from sqlaqueue.demo.demo import check, content, printable_path, regular_files
from sqlaqueue.demo.models import SCHEMA, Base, LockedFile, read_file
from tests.cli.conftest import COMMAND, environment, fill, sqlaqueue
from tests.servers import Database, Server

STRATEGIES = ("update_status", "delete_returning", "batch_select")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "files"
    directory.mkdir()
    fill(directory)
    return directory


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory for temporary files that the server's account can access; pytest's is private to root."""
    with tempfile.TemporaryDirectory(prefix="sqlaqueue-", dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def plain_url(database: Database) -> str:
    return database.url().replace("postgresql+psycopg:", "postgresql:")


def schemas(database: Database) -> list[str]:
    with database.connect() as connection:
        rows = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'sqlaqueue%'")
        return [row[0] for row in rows]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.1)


@contextlib.contextmanager
def started(*arguments: str, **changes: str | None) -> Iterator[subprocess.Popen[str]]:
    """Run the demo, from the first line of its output on."""
    with subprocess.Popen(
        [*COMMAND, "demo", "--workers", "2", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(PYTHONUNBUFFERED="1", **changes),
    ) as demo:
        assert demo.stdout is not None
        assert demo.stdout.readline().startswith("update_status")
        yield demo


@pytest.mark.parametrize(
    "strategy", [STRATEGIES[0], *(pytest.param(each, marks=pytest.mark.thorough) for each in STRATEGIES[1:])]
)
def test_every_file_is_read_exactly_once_when_a_worker_is_killed(
    strategy: str, database: Database, files: Path
) -> None:
    url = plain_url(database)
    result = sqlaqueue("demo", "--path", files, "--strategy", strategy, "--workers", "3", "--batch", "8", "--url", url)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert f"{strategy}: 63 files, 3 worker processes" in result.stdout
    assert "63 files: every one stored exactly once, none lost" in result.stdout
    held = re.search(r"was killed with SIGKILL while it held (\d+) jobs", result.stdout)
    assert held
    assert int(held[1]) >= 1
    assert f"{held[1]} jobs were held by the killed worker" in result.stdout
    assert f"{held[1]} run by other workers" in result.stdout
    assert (f"{held[1]} rescued" in result.stdout) == (strategy == "update_status")
    assert re.search(r"63 jobs, \d+ jobs per second", result.stdout)
    assert schemas(database) == []


@pytest.mark.once
def test_all_strategies_with_a_single_file(database: Database, tmp_path: Path) -> None:
    (tmp_path / "only").write_text("one\n")
    result = sqlaqueue("demo", "--path", tmp_path, "--strategy", "all", "--workers", "2", "--url", database.url())
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("1 files: every one stored exactly once, none lost") == 3
    assert result.stdout.count("killed with SIGKILL while it held 1 jobs") == 3


@pytest.mark.once
def test_the_embedded_server_leaves_nothing_behind(files: Path, temporary: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    changes = {"TMPDIR": str(temporary), "HOME": str(home), "XDG_RUNTIME_DIR": None, "PGOPTIONS": "-c nonsense=1"}
    result = sqlaqueue("demo", "--path", files, "--strategy", "batch_select", "--workers", "2", **changes)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert list(temporary.iterdir()) == []
    assert list(home.iterdir()) == []


@pytest.mark.once
def test_an_interrupted_demo_leaves_nothing_behind(temporary: Path) -> None:
    with started(TMPDIR=str(temporary)) as demo:
        demo.send_signal(signal.SIGINT)
        try:
            _, errors = demo.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            # Python ignores an exception that a signal raises in the callback of a weak reference.
            demo.send_signal(signal.SIGINT)
            _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert errors.endswith("\nAborted!\n")
    assert list(temporary.iterdir()) == []


@pytest.mark.once
def test_workers_and_server_end_when_the_demo_is_killed(temporary: Path) -> None:
    with started(TMPDIR=str(temporary)) as demo:
        assert list(temporary.iterdir()) != []
        demo.kill()
    until(lambda: list(temporary.iterdir()) == [])


@pytest.mark.thorough
@pytest.mark.once
def test_the_workers_end_when_the_demo_is_terminated(database: Database) -> None:
    def clients() -> int:
        with database.connect() as connection:
            row = connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            ).fetchone()
        return row[0] if row else 0

    with started("--url", database.url()) as demo:
        until(lambda: clients() > 2)
        demo.terminate()
        demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert schemas(database) == []
    until(lambda: clients() == 0)


@pytest.mark.thorough
@pytest.mark.once
def test_a_terminal_shows_a_progress_bar(database: Database, files: Path) -> None:
    ours, theirs = os.openpty()
    options = ("--strategy", "batch_select", "--workers", "2", "--url", database.url())
    command = [*COMMAND, "demo", "--path", str(files), *options]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment(TERM="xterm")) as demo:
        os.close(theirs)
        output = b""
        with contextlib.suppress(OSError):  # raised at the end of a terminal
            while block := os.read(ours, 4096):
                output += block
    os.close(ours)
    assert demo.returncode == 0, output
    assert b"0 pending, " in output
    assert b"63 done, 0 failed" in output
    assert b"\x1b[2K" in output


@pytest.mark.once
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers by Linux's /proc")
def test_the_demo_fails_when_all_workers_are_killed(database: Database) -> None:
    with started("--url", database.url()) as demo:
        children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children")
        until(lambda: len(children.read_text().split()) == 2)
        for worker in children.read_text().split():
            os.kill(int(worker), signal.SIGKILL)
        output, errors = demo.communicate(timeout=60)
    assert demo.returncode == 1, output + errors
    assert "no worker is left" in output
    assert "ended with exit code -9" in output
    assert "its job is pending" in output
    assert schemas(database) == []


@pytest.mark.once
def test_a_database_error_is_reported_without_a_traceback(database: Database, files: Path) -> None:
    with database.connect() as connection:
        connection.execute("""
            CREATE FUNCTION spoil() RETURNS event_trigger LANGUAGE plpgsql AS
              $$ BEGIN ALTER TABLE IF EXISTS sqlaqueue_demo.locked_file DROP COLUMN IF EXISTS lines; END $$;
            CREATE EVENT TRIGGER spoil ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION spoil()
        """)
    result = sqlaqueue("demo", "--path", files, "--strategy", "batch_select", "--url", database.url())
    assert result.returncode == 1
    assert 'The database failed during the demo: column "lines"' in result.stderr
    assert "Traceback" not in result.stderr
    assert schemas(database) == []


TAMPERED = {
    "NEW.lines = NEW.lines + 1": "the table contains",
    "NEW.runs = 2": "stored 2 times instead of once",
    "NEW.runs = 0": "stored 0 times instead of once",
    "NEW.path = 'elsewhere'": "below/file3: 0 jobs in the table instead of one",
    "NEW.status = 'failed'": "below/file4: its job is failed",
    "NEW.status = 'cancelled'": "below/file5: its job is cancelled",
}


@pytest.mark.once
def test_tampered_results_fail_the_check(database: Database, files: Path) -> None:
    changes = "; ".join(
        f"IF NEW.path LIKE '%/below/file{number}' THEN {change}; END IF" for number, change in enumerate(TAMPERED)
    )
    # Triggers in the database change some rows, created together with the demo's table.
    with database.connect() as connection:
        connection.execute(f"""
            CREATE FUNCTION tamper() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {changes}; RETURN NEW; END $$;
            CREATE FUNCTION attach() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
              IF to_regclass('sqlaqueue_demo.locked_file') IS NOT NULL THEN
                CREATE OR REPLACE TRIGGER tamper BEFORE UPDATE ON sqlaqueue_demo.locked_file FOR EACH ROW
                  WHEN (NEW.status = 'completed') EXECUTE FUNCTION public.tamper();
              END IF;
            END $$;
            CREATE EVENT TRIGGER attach ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION attach()
        """)
    result = sqlaqueue("demo", "--path", files, "--strategy", "batch_select", "--workers", "2", "--url", database.url())
    assert result.returncode == 1, result.stdout + result.stderr
    assert "problems:" in result.stdout
    for said in TAMPERED.values():
        assert said in result.stdout
    assert schemas(database) == []


BAD_INPUT = {
    ("--workers", "0"): "--workers",
    ("--workers", "1"): "--workers",
    ("--batch", "0"): "--batch",
    ("--strategy", "unknown"): "'update_status', 'delete_returning', 'batch_select', 'all'",
    ("--path", __file__): "is a file",
    ("--path", "/does/not/exist"): "does not exist",
    ("--url", "nonsense"): "--url: ",
    ("--url", "postgresql://localhost:port/x"): "--url: ",
    ("--url", "mysql://localhost/x"): "mysql:// is not supported",
    ("--url", "postgresql://localhost:1/x"): "the database cannot be used",
}


@pytest.mark.once
@pytest.mark.parametrize("arguments", BAD_INPUT, ids=" ".join)
def test_bad_input_is_refused(arguments: tuple[str, str]) -> None:
    result = CliRunner().invoke(main, ["demo", *arguments], env={"COLUMNS": "200"}, prog_name="sqlaqueue")
    assert result.exit_code == 2
    assert BAD_INPUT[arguments] in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.once
def test_a_directory_without_files_is_refused(tmp_path: Path) -> None:
    result = sqlaqueue("demo", "--path", tmp_path)
    assert result.returncode == 2
    assert f"there are no files below {tmp_path}" in result.stderr


@pytest.mark.once
def test_an_existing_schema_is_an_error_and_kept(database: Database, files: Path) -> None:
    with database.connect() as connection:
        connection.execute("CREATE SCHEMA sqlaqueue_demo")
    result = sqlaqueue("demo", "--path", files, "--url", database.url())
    assert result.returncode == 2
    assert "DROP SCHEMA sqlaqueue_demo CASCADE" in result.stderr
    assert schemas(database) == ["sqlaqueue_demo"]


@pytest.mark.once
@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_jobs_of_unreadable_files_fail(database: Database, files: Path) -> None:
    (files / "below" / "file7").chmod(0)
    (files / "below" / "further").chmod(0)
    result = sqlaqueue("demo", "--path", files, "--url", database.url())
    (files / "below" / "further").chmod(0o755)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 files that cannot be read" in result.stdout
    assert "below/file7" in result.stdout
    assert "skipped, as they cannot be read:" in result.stdout


# -- its check finds wrong rows, and names their files ------------------------------------------------------------

KILLED, OTHER = 1, 2


@pytest.fixture(scope="module")
def engine(server: Server) -> Iterator[Engine]:
    with server.database() as database:
        engine = create_engine(database.url())
        with engine.begin() as connection:
            connection.execute(CreateSchema(SCHEMA))
            Base.metadata.create_all(connection)
        yield engine
        engine.dispose()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """A session whose rows are rolled back."""
    with Session(engine) as session:
        yield session


@pytest.fixture
def path(tmp_path: Path) -> bytes:
    (tmp_path / "file").write_text("one\ntwo\nthree")
    return os.fsencode(tmp_path / "file")


def job(file: bytes, **changes: Any) -> LockedFile:
    data = Path(os.fsdecode(file)).read_bytes()
    right = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "lines": 2, "runs": 1, "read_by": OTHER}
    return LockedFile(**({"path": file, "status": "completed"} | right | changes))


def test_correct_jobs_have_no_problems(session: Session, path: bytes) -> None:
    session.add(held := job(path))
    session.flush()
    findings = check(session, LockedFile, [path], [path, b"/appeared"], killed=KILLED, held=[held.id])
    assert findings.problems == []
    assert (findings.completed, findings.rerun, findings.appeared, findings.unreadable) == (1, 1, 1, [])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "sum": ({"sha256": "0" * 64}, "the table contains"),
    "size": ({"size": 12}, "the table contains"),
    "lines": ({"lines": 3}, "the table contains"),
    "two runs": ({"runs": 2}, "2 times"),
    "no run": ({"runs": 0}, "0 times"),
    "pending": ({"status": "pending"}, "its job is pending"),
    "failed": ({"status": "failed", "runs": 0, "last_error": "for no reason"}, "but the file can be read (for no"),
    "by the killed worker": ({"read_by": KILLED}, "not run by another"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_job_is_a_problem(session: Session, path: bytes, kind: str) -> None:
    changes, words = WRONG[kind]
    session.add(wrong := job(path, **changes))
    session.flush()
    findings = check(session, LockedFile, [path], [path], killed=KILLED, held=[wrong.id])
    assert [problem for problem in findings.problems if printable_path(path) in problem and words in problem]


def test_missing_duplicate_and_unknown_jobs_are_problems(session: Session, path: bytes) -> None:
    session.add_all([job(path), job(path), job(path, path=b"/unknown")])
    findings = check(session, LockedFile, [path, b"/lost"], [path, b"/lost"])
    assert f"{printable_path(path)}: 2 jobs in the table instead of one" in findings.problems
    assert "/lost: 0 jobs in the table instead of one" in findings.problems
    assert "/unknown: a job in the table that was not enqueued" in findings.problems


def test_a_file_deleted_during_the_demo_is_a_problem(session: Session, path: bytes) -> None:
    session.add(job(path))
    findings = check(session, LockedFile, [path], [])
    assert findings.problems == [f"{printable_path(path)}: deleted during the demo; its job is completed"]


def test_an_unreadable_file_is_no_problem(session: Session, path: bytes) -> None:
    session.add(job(path, path=path + b"/below a file", status="failed", runs=0, sha256=None))
    findings = check(session, LockedFile, [path + b"/below a file"], [path + b"/below a file"])
    assert findings.problems == []
    assert findings.unreadable == [path + b"/below a file"]


def test_a_file_that_became_unreadable_is_a_problem(session: Session, path: bytes) -> None:
    session.add(job(path, path=path + b"/below a file"))
    findings = check(session, LockedFile, [path + b"/below a file"], [path + b"/below a file"])
    assert findings.problems == [
        f"{printable_path(path)}/below a file: read by a worker, but not readable now; its permissions have changed"
    ]


def test_handler_and_check_have_the_same_result(session: Session, path: bytes) -> None:
    session.add(read := LockedFile(path=path))
    session.flush()
    read_file(session, read)
    session.flush()
    assert content(path) == (read.sha256, read.size, read.lines)
    assert (read.lines, read.runs) == (2, 1)


def test_the_handler_fails_the_job_of_an_unreadable_file(session: Session) -> None:
    with pytest.raises(Fail, match="No such file"):
        read_file(session, LockedFile(path=b"/does/not/exist"))


def test_regular_files_and_unreadable_directories_are_listed(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    (tmp_path / "excluded").mkdir()
    (tmp_path / "excluded" / "file").touch()
    # Longer than the limit of a path: not readable by any user, including root.
    deep = tmp_path
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=fd)
        below = os.open("d" * 250, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd, deep = below, deep / ("d" * 250)
    os.close(fd)
    files, unreadable = regular_files(tmp_path, exclude=["excluded"])
    assert files == [os.fsencode(tmp_path / "kept")]
    assert len(unreadable) == 1
    assert os.fsencode(deep).startswith(unreadable[0])


def test_unprintable_characters_of_a_path_are_escaped() -> None:
    assert printable_path(b"/\xc3\xbc/a\n\x1b[31m\xff") == "/ü/a\\n\\x1b[31m\\udcff"
