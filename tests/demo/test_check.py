"""The demo's check finds what is wrong in a real table, and says which file it is about."""

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
from sqlaqueue.demo.check import check, content, regular_files, show
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


def test_what_is_right(session: Session, path: bytes) -> None:
    session.add(held := job(path))
    session.flush()
    findings = check(session, LockedFile, [path], [path, b"/appeared"], killed=KILLED, held=[held.id])
    assert findings.problems == []
    assert (findings.completed, findings.rerun, findings.appeared, findings.unreadable) == (1, 1, 1, [])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "sum": ({"sha256": "0" * 64}, "the table says"),
    "size": ({"size": 12}, "the table says"),
    "lines": ({"lines": 3}, "the table says"),
    "two runs": ({"runs": 2}, "2 times"),
    "no run": ({"runs": 0}, "0 times"),
    "pending": ({"status": "pending"}, "its job is pending"),
    "failed": ({"status": "failed", "runs": 0, "last_error": "for no reason"}, "failed, though it can be read (for no"),
    "by the killed worker": ({"read_by": KILLED}, "run by no other"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong(session: Session, path: bytes, kind: str) -> None:
    changes, words = WRONG[kind]
    session.add(wrong := job(path, **changes))
    session.flush()
    findings = check(session, LockedFile, [path], [path], killed=KILLED, held=[wrong.id])
    assert [problem for problem in findings.problems if show(path) in problem and words in problem]


def test_a_lost_a_doubled_and_an_unknown_job(session: Session, path: bytes) -> None:
    session.add_all([job(path), job(path), job(path, path=b"/unknown")])
    findings = check(session, LockedFile, [path, b"/lost"], [path, b"/lost"])
    assert f"{show(path)}: 2 jobs in the table instead of one" in findings.problems
    assert "/lost: 0 jobs in the table instead of one" in findings.problems
    assert "/unknown: a job in the table that nobody enqueued" in findings.problems


def test_a_file_that_is_removed_meanwhile(session: Session, path: bytes) -> None:
    session.add(job(path))
    findings = check(session, LockedFile, [path], [])
    assert findings.problems == [f"{show(path)}: removed while the demo ran; its job is completed"]


def test_a_file_that_nobody_can_read(session: Session, path: bytes) -> None:
    session.add(job(path, path=path + b"/below a file", status="failed", runs=0, sha256=None))
    findings = check(session, LockedFile, [path + b"/below a file"], [path + b"/below a file"])
    assert findings.problems == []
    assert findings.unreadable == [path + b"/below a file"]


def test_a_file_that_is_closed_meanwhile(session: Session, path: bytes) -> None:
    session.add(job(path, path=path + b"/below a file"))
    findings = check(session, LockedFile, [path + b"/below a file"], [path + b"/below a file"])
    assert findings.problems == [
        f"{show(path)}/below a file: read by a worker, and now it cannot be read: it was closed while the demo ran"
    ]


def test_the_handler_and_the_check_count_alike(session: Session, path: bytes) -> None:
    session.add(read := LockedFile(path=path))
    session.flush()
    read_file(session, read)
    session.flush()
    assert content(path) == (read.sha256, read.size, read.lines)
    assert (read.lines, read.runs) == (2, 1)


def test_a_file_that_cannot_be_read_fails_its_job(session: Session) -> None:
    with pytest.raises(Fail, match="No such file"):
        read_file(session, LockedFile(path=b"/does/not/exist"))


def test_regular_files_and_what_is_closed(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    (tmp_path / "left out").mkdir()
    (tmp_path / "left out" / "file").touch()
    # Longer than any path may be: closed to everybody, root among them.
    deep = tmp_path
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=fd)
        below = os.open("d" * 250, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd, deep = below, deep / ("d" * 250)
    os.close(fd)
    files, closed = regular_files(tmp_path, leave_out=["left out"])
    assert files == [os.fsencode(tmp_path / "kept")]
    assert len(closed) == 1
    assert os.fsencode(deep).startswith(closed[0])


def test_a_path_is_shown_so_that_a_terminal_survives_it() -> None:
    assert show(b"/\xc3\xbc/a\n\x1b[31m\xff") == "/ü/a\\n\\x1b[31m\\udcff"
