"""The demo's check finds wrong rows in a real table, and names their files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from sqlalchemy.schema import CreateSchema

from sqlaqueue import Fail
from sqlaqueue.demo.demo import check, content, printable_path, regular_files
from sqlaqueue.demo.models import SCHEMA, Base, LockedFile, read_file
from tests.servers import Database

KILLED, OTHER = 1, 2


@pytest.fixture
def session(database: Database) -> Iterator[Session]:
    engine = create_engine(database.url())
    with Session(engine) as session:
        session.execute(CreateSchema(SCHEMA))
        Base.metadata.create_all(session.connection())
        yield session
    engine.dispose()


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
    "failed": (
        {"status": "failed", "runs": 0, "last_error": "for no reason"},
        "but the file can be read (for no",
    ),
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
