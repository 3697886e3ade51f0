"""Flow control: autogenerate adds, changes and removes its indexes, functions, triggers and the table of rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import mapped_column

from sqlaqueue import Fair, Limit, Order, QueueConfig, Rate
from tests.migrations.models import enqueue, order, run_all
from tests.migrations.project import Project, changed, dump, in_any_order, wanted

if TYPE_CHECKING:
    from tests.servers import Database

STARTED = {"started_at": "started_at"}


def orders(**config: Any) -> type[Any]:
    """Map a queue with a column whose name must be quoted."""
    return order(QueueConfig(columns=STARTED, **config), kind=mapped_column("Kind", sa.Text))


LIMIT, RATE = Limit(2, per="article"), Rate(10, every=1, per="kind")
EVERYTHING: dict[str, Any] = {
    "limits": [LIMIT, Limit(5), Limit(3, per=("article", "kind"))],
    "rates": [RATE, Rate(100, every=60)],
    "order": Order("kind", on_failure="cancel"),
    "fair": Fair("article", "kind"),
}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "everything": ({}, EVERYTHING),
    "nothing": (EVERYTHING, {}),
    "a limit": ({"limits": [LIMIT]}, {"limits": [LIMIT, Limit(1)]}),
    "another key": ({"limits": [LIMIT]}, {"limits": [Limit(2, per="kind")]}),
    "a rate": ({"limits": [LIMIT]}, {"limits": [LIMIT], "rates": [RATE]}),
    "another order": ({"order": Order("kind")}, {"order": Order("kind", by="article", on_failure="continue")}),
    "turns": ({"limits": [LIMIT]}, {"limits": [LIMIT], "fair": Fair("article")}),
}
for held in ("batch_select", "delete_returning"):
    CHANGES |= {
        f"everything, {held}": ({"strategy": held}, EVERYTHING | {"strategy": held}),
        f"nothing, {held}": (EVERYTHING | {"strategy": held}, {"strategy": held}),
    }
THOROUGH = {"a limit", "turns", "another key", "nothing, batch_select", "everything, delete_returning"}


@pytest.mark.parametrize(
    "change", [pytest.param(each, marks=pytest.mark.thorough) if each in THOROUGH else each for each in CHANGES]
)
def test_a_change_of_the_configuration(database: Database, make: Any, change: str) -> None:
    before, after = (orders(**each) for each in CHANGES[change])
    changed(make(before), after)
    assert in_any_order(dump(database)) == in_any_order(wanted(after, database))


def test_numbers_are_no_difference(make: Any) -> None:
    project: Project = make(orders(limits=[LIMIT], rates=[RATE]))
    project.metadata = orders(limits=[Limit(7, per="article")], rates=[Rate(20, every=2, per="kind")]).metadata
    project.check()


def test_a_queue_is_served_while_flow_control_is_added_and_removed(make: Any, engine: sa.Engine) -> None:
    plain, limited = orders(), orders(limits=[Limit(1, per="article")], order=Order("kind"))
    project: Project = make(plain)
    enqueue(engine, plain, "a", "a", "b", kind="x")
    project.metadata = limited.metadata
    project.revise()
    project.upgrade()
    # A process of the version before claims as before, and the new one obeys.
    assert run_all(engine, limited) == ["a"]
    assert run_all(engine, plain) == ["a", "b"]
    enqueue(engine, plain, "c", kind="y")
    project.metadata = plain.metadata
    project.revise()
    project.upgrade()
    assert run_all(engine, plain) == ["c"]
