"""The table of engines and features, made from what the engines refuse and from the reasons of the suite.

``python -m tests.conformance`` prints the table of docs/databases.md and the reasons of docs/evidence/engines.md; with
``--write`` it writes the pages.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import mapped_column, relationship

from sqlaqueue import ConcurrencyLimit, FairShare, InOrder, QueueConfig, QueueMixin, RateLimit, Unique
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.mariadb.prepare import MariaDB
from sqlaqueue.postgresql.start_checks import _on_shards
from sqlaqueue.sqlite.prepare import SQLite
from sqlaqueue.testing.conformance.engines import ENGINES, EngineUnderTest
from tests.models import new_base

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- begin: python -m tests.conformance --write -->", "<!-- end -->"

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Strategy `update_status`": {},
    "Strategy `batch_select`": {"strategy": "batch_select"},
    "Strategy `delete_returning`": {"strategy": "delete_returning"},
    "Strategy `delete_returning`, with rows that are their own messages": {
        "strategy": "delete_returning",
        "rows_are_messages": True,
    },
    "`Unique`": {"unique": Unique("customer")},
    "`ConcurrencyLimit`": {"flow_control": [ConcurrencyLimit(2, per="customer")]},
    "`RateLimit`": {"flow_control": [RateLimit(10, every=timedelta(seconds=1))]},
    "`InOrder`": {"flow_control": [InOrder("customer")]},
    "`FairShare`": {"flow_control": [FairShare("customer")]},
    "Batches and dependencies: `waits_for`": {"waits_for": "children"},
}
"""Rows of the table: what may be configured."""

_NOTIFIED = "Idle workers of other processes start within a tenth of a second"
_POLLED = "the engine sends no notifications to other processes, so that these poll"


@dataclass(frozen=True)
class Column:
    """One engine in the table."""

    title: str
    refuse: Callable[[Any], None] = lambda _: None
    """Raises ConfigurationError for a queue that the engine cannot carry."""
    under_test: EngineUnderTest | None = field(default_factory=EngineUnderTest)
    """Its reasons; None if the suite does not run on it, so that the table tells nothing of its own features."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """What nothing refuses, as something else takes its place."""


@cache
def columns() -> tuple[Column, ...]:
    """Return the engines, from left to right. Add an engine here."""
    known = {each.dialect: each for each in ENGINES}
    return (
        Column("PostgreSQL", under_test=known["postgresql"]),
        Column("SQLite", SQLite().check_supported, known["sqlite"]),
        Column("MariaDB", MariaDB("mariadb").check_supported, known["mariadb"]),
        Column("Citus, on shards", _refuse_on_shards, None, {_NOTIFIED: _POLLED}),
    )


def _refuse_on_shards(spec: Any) -> None:
    for reason in _on_shards(spec, "the table"):
        # That the queue has notify=False goes without saying in all other rows.
        if "notify=True" not in reason:
            raise ConfigurationError(reason)


@cache
def spec_with(feature: str) -> Any:
    """Return the queue of a model with an option of :data:`CONFIGS`."""

    class Job(QueueMixin, new_base()):
        __tablename__ = "job"
        __queue__ = QueueConfig(**CONFIGS[feature])
        id = mapped_column(sa.Integer(), primary_key=True)
        customer = mapped_column(sa.Integer())
        parent_id = mapped_column(sa.ForeignKey("job.id"))
        children = relationship("Job")

    return spec_of(Job)


def missing(column: Column) -> dict[str, str]:
    """Return the features that an engine does not have, each with the reason."""
    found: dict[str, str] = {}
    for feature in CONFIGS:
        spec = spec_with(feature)
        try:
            column.refuse(spec)
        except ConfigurationError as error:
            found[feature] = str(error).removeprefix("Job: ")
    found |= column.lacks
    for reason in dict.fromkeys(column.under_test.reasons.values() if column.under_test else ()):
        if reason.feature is not None:
            found.setdefault(reason.feature, reason.why)
    return found


def features() -> list[str]:
    """Return the rows of the table."""
    lacking = [feature for column in columns() for feature in missing(column)]
    return [*CONFIGS, *dict.fromkeys(each for each in lacking if each not in CONFIGS)]


def table() -> Iterator[str]:
    """Return the lines of the table."""
    yield f"| feature | {' | '.join(column.title for column in columns())} |"
    yield f"| --- |{' --- |' * len(columns())}"
    for feature in features():
        cells = (_cell(column, feature) for column in columns())
        yield f"| {feature} | {' | '.join(cells)} |"


def reasons() -> Iterator[str]:
    """Return the lines that say why an engine lacks features."""
    for number, column in enumerate(each for each in columns() if missing(each)):
        if number:
            yield ""
        yield f"**{column.title}** does not have:"
        yield ""
        for why in dict.fromkeys(missing(column).values()):
            yield f"- {'; '.join(name for name, its in missing(column).items() if its == why)}: {why}."


def _cell(column: Column, feature: str) -> str:
    if feature in missing(column):
        return "no"
    is_known = column.under_test is not None or feature in CONFIGS or feature in column.lacks
    return "yes" if is_known else "not tested"


PAGES: Mapping[Path, Callable[[], Iterator[str]]] = {
    DOCS / "databases.md": table,
    DOCS / "evidence" / "engines.md": reasons,
}
"""The pages with what is generated in them."""


def page(path: Path) -> str:
    """Return the text of a page with the lines that are right now."""
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, "", *PAGES[path](), "", END]) + after


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        for path in PAGES:
            path.write_text(page(path))
    else:
        sys.stdout.write("\n".join([*table(), *reasons(), ""]))
