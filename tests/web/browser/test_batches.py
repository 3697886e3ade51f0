"""The page of a batch, of a member and of a parent, on a desktop and a phone, light and dark, without JavaScript."""

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, mapped_column, relationship, sessionmaker

from sqlaqueue import claim, complete, fail
from sqlaqueue.web import Access, Dashboard
from tests.models import new_base
from tests.servers import Server
from tests.waits.models import job_class
from tests.web.browser.conftest import DESKTOP, PHONE, MakeView
from tests.web.browser.example import Site
from tests.web.browser.test_pages import audit
from tests.web.conftest import serving

LONG = "ValueError: invalid literal for int() with base 10: 'three hundred and twenty-one, or so'"
PATHS = [
    "queues/import/job?key=1",
    "queues/row/job?key=1",
    "queues/extract/job?key=1",
    "queues/load/job?key=12",
    "queues/row/confirm?action=requeue&all=1&state=failed&f.import_id=1",
]


def make_import() -> tuple[Any, ...]:
    """Return classes as the documentation has them: a batch of rows, and a chain of loads after an extract."""
    base = new_base()
    key = mapped_column(sa.Integer, primary_key=True)
    batch = job_class(
        base,
        "Import",
        {"id": key, "rows": relationship("Row", back_populates="batch")},
        waits_for="rows",
    )
    of_row = {
        "id": mapped_column(sa.Integer, primary_key=True),
        "line": mapped_column(sa.String),
        "import_id": mapped_column(sa.ForeignKey("import.id"), index=True),
        "batch": relationship("Import", back_populates="rows"),
    }
    row = job_class(base, "Row", of_row, max_attempts=1)
    extract = job_class(base, "Extract", {"id": mapped_column(sa.Integer, primary_key=True)}, max_attempts=1)
    of_load = mapped_column(sa.Integer, primary_key=True)
    loads = {
        "id": of_load,
        "extract_id": mapped_column(sa.ForeignKey("extract.id")),
        "parent_id": mapped_column(sa.ForeignKey("load.id")),
        "extract": relationship("Extract"),
        "parent": relationship("Load", remote_side=[of_load]),
    }
    return batch, row, extract, job_class(base, "Load", loads, waits_for=("extract", "parent"))


@pytest.fixture
def batches(server: Server) -> Iterator[Site]:
    models = make_import()
    batch, row, extract, load = models
    with server.database() as database:
        engine = sa.create_engine(database.url())
        batch.metadata.create_all(engine)
        with Session(engine) as session:
            session.add(batch(id=1, rows=[row(line=f"{number}") for number in range(120)]))
            session.add(extract(id=1))
            session.add_all([load(id=n, extract_id=1, parent_id=n - 1 or None) for n in range(1, 31)])
            session.commit()
            for verb, number, options in ((fail, 7, {"error": LONG}), (complete, 64, {})):
                session.execute(verb(session.scalars(claim(row, number)).all(), **options))
            session.execute(fail(session.scalars(claim(extract, 1)).all(), error=LONG))
            session.commit()
        dashboard = Dashboard(models, sessionmaker(engine), access=lambda _: Access(read=True, act=True, user="ada"))
        with serving(dashboard) as root:
            yield Site(root, engine, database)
        engine.dispose()


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_each_page_of_a_batch_is_for_everybody(batches: Site, open_view: MakeView, size: Any) -> None:
    view = open_view(batches, size=size, follows=False)
    problems = [problem for path in PATHS for problem in audit(view.open(path))]
    assert not problems, "\n".join(problems)


def test_failed_members_are_requeued_without_javascript(batches: Site, open_view: MakeView) -> None:
    view = open_view(batches, javascript=False)
    view.open(PATHS[0])
    assert "71 of 120 ended, 7 failed" in view.text("main")
    view.follow(view.page.get_by_role("button", name="Requeue the failed members…"))
    assert view.text("h1") == "Requeue 7 jobs?"
    view.follow(view.page.get_by_role("button", name="Requeue 7 jobs"))
    assert "7 jobs are pending again." in view.text("main")
    assert batches.execute("SELECT count(*) FROM row WHERE status = 'failed'") == [(0,)]
