"""An application on any engine whose first job hangs, and ``sqlaqueue worker --isolate`` that drains its queue."""

from pathlib import Path

from tests.cli.conftest import environment
from tests.programs import run_program

APP = """
import re
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlaqueue import Constant, Consumer, QueueConfig, QueueMixin, prepare

class Base(DeclarativeBase):
    pass

class Page(QueueMixin, Base):
    __tablename__ = "isolated_page"
    __queue__ = QueueConfig({options}, max_attempts=2, retry=Constant(delay=0, jitter=0))
    id: Mapped[int] = mapped_column(primary_key=True)

class Written(Base):
    __tablename__ = "isolated_written"
    id: Mapped[int] = mapped_column(primary_key=True)

def write(session, page):
    session.add(Written(id=page.id))
    session.flush()
    if page.id == 1:
        re.match("(a+)+$", "a" * 40 + "b")

engine = prepare(sa.create_engine("{url}"))
consumer = Consumer(Page, write, sessionmaker(engine), timeout=0.3, poll_interval=0.05, lease=3600)
"""
FILL = """
from app import *
Base.metadata.create_all(engine)
with Session(engine) as session:
    session.add_all([Page(id=1), Page(id=2)])
    session.commit()
"""
SHOW = """
from app import *
with Session(engine) as session:
    for table in ("isolated_page", "isolated_written", "sqlaqueue_crash_journal", "sqlaqueue_dead_letter"):
        if sa.inspect(engine).has_table(table):
            print(table, session.execute(sa.text("SELECT * FROM " + table)).all())
Base.metadata.drop_all(engine)
"""


def drain_isolated(directory: Path, url: str, options: str) -> dict[str, str]:
    """Have a worker run two jobs, the first of which hangs, and return the rows of the tables as texts."""
    texts = {"app.py": APP.format(options=options, url=url), "fill.py": FILL, "show.py": SHOW}
    for name, text in texts.items():
        (directory / name).write_text(text)

    def run(program: str | Path, *arguments: str) -> str:
        done = run_program(program, *arguments, environment=environment(), directory=directory)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    run(directory / "fill.py")
    output = run("sqlaqueue", "worker", "app:consumer", "--isolate", "--drain")
    rows = dict(line.split(" ", 1) for line in run(directory / "show.py").splitlines())
    assert rows["isolated_written"] == "[(2,)]"
    assert "JobTimeout: the handler ran for longer than 0.3 seconds, and its process was killed" in str(rows), output
    assert output.count("attempt 2 of 2 failed, no further try: JobTimeout: ") == 1, (output, rows)
    return rows
