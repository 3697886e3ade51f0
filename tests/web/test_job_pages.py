"""Pages of a list of jobs: complete, without repetitions, and at a bounded cost."""

from __future__ import annotations

import random
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.web.job_lists import create, keys, make_rows, pages

SORTS = ["id", "few", "many", "other"]


def fill(engine: sa.Engine, model: Any, seed: int, rows: int = 300) -> None:
    chance = random.Random(seed)
    with Session(engine) as session:
        for number in range(1, rows + 1):
            session.add(
                model(
                    id=number * 7 % 1009,
                    few=chance.choice([None, 1, 1, 1, 2, 3]),
                    many=chance.choice([None, chance.randrange(1000), chance.randrange(30)]),
                    other=chance.choice([None, 5, chance.randrange(10)]),
                    status=chance.choice(["pending", "pending", "processing", "failed", "completed", "cancelled"]),
                    priority=chance.randrange(3),
                )
            )
        session.commit()


def expected(engine: sa.Engine, where: str, order: str) -> list[str]:
    with engine.connect() as connection:
        return [str(key) for key in connection.scalars(sa.text(f"SELECT id FROM row WHERE {where} ORDER BY {order}"))]


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
    ([("f.many.null", "yes")], "many IS NULL"),
    ([("f.many.null", "no"), ("f.few", "1")], "many IS NOT NULL AND few = 1"),
    ([("state", "failed")], "status = 'failed'"),
    ([("state", "pending"), ("f.many.max", "20")], "status = 'pending' AND many <= 20"),
    ([("f.few", "1"), ("f.other", "5")], "few = 1 AND other = 5"),
]


@pytest.mark.parametrize("window", [20_000, 40])
@pytest.mark.parametrize("sort", ORDERS)
def test_pages_are_complete_in_both_directions(
    engine: sa.Engine, sort: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_rows()
    create(engine, model)
    fill(engine, model, seed=1)
    for module in ("job_windows", "job_reader", "job_pages"):
        monkeypatch.setattr(f"sqlaqueue.web.data.{module}.WINDOW", window)
    for parameters, where in FILTERS:
        found = list(pages(engine, model, *parameters, ("sort", sort), size=13))
        wanted = expected(engine, where, ORDERS[sort])
        note = f"{sort} {where}"
        assert sorted(keys(found)) == sorted(wanted), note
        if ("f.few", "1") not in parameters and ("f.few.min", "2") not in parameters:
            assert keys(found) == wanted, note
        back = list(
            pages(engine, model, *parameters, ("sort", sort), size=13, before=found[-1].previous, backwards=True)
        )
        assert keys(reversed(back)) == keys(found[:-1]) if found[-1].previous else len(found) == 1, note
        if window == 20_000:
            assert all(len(each.jobs) == 13 for each in found[:-1])
