"""The pages use the words of the glossary, and the same parts look the same everywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import sqlaqueue.web
from tests.unique.models import create, make_job
from tests.web.jobs_of import add, fail_jobs
from tests.web.models import Queues

TEMPLATES = sorted((Path(sqlaqueue.web.__file__).parent / "templates").glob("*.html"))

PAGES = (
    "/",
    "/health",
    "/schedules",
    *(f"/queues/{queue}{rest}" for queue in ("email", "invoice", "picture") for rest in ("", "/jobs", "/claim")),
    "/queues/email/job?key=1",
    "/queues/email/edit?key=1",
    "/queues/email/confirm?action=cancel&all=1",
)


def text_of(page: str) -> str:
    """Return the text of a page without code and without columns of the application."""
    main = page.partition("<main")[2]
    return re.sub(r"<[^>]+>", " ", re.sub(r"<(code|pre)\b.*?</\1>", " ", main, flags=re.DOTALL))


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_state_and_a_consumer_have_one_name(template: Path) -> None:
    text = template.read_text()
    # A worker is a thread or task of a Consumer; what the pages show are Consumers. A state is called "processing".
    assert not re.search(r"\bWorkers?\b|\b[Nn]o worker\b|>Running<|\"Running\"|\b[Rr]unning jobs?\b", text)


async def test_each_page_has_plain_words_breadcrumbs_and_buttons(
    engine: sa.Engine, queues: Queues, client_of: Any
) -> None:
    add(engine, queues.Email(recipient="a"))
    async with client_of() as browser:
        for path in PAGES:
            response = await browser.get(path)
            assert response.status_code == 200, path
            text = text_of(response.text)
            assert not re.search(r"\b(requeue|cancel|rescue|purge|pause|resume|enqueue|claim)\(\)", text), path
            for crumbs in re.findall(r'<nav class="crumbs".*?</nav>', response.text, re.DOTALL):
                assert crumbs.count("<a ") == crumbs.count(">/<") + 1, path
            refresh = re.findall(r'<a class="([^"]*)"[^>]*>Refresh</a>', response.text)
            assert set(refresh) <= {"button"}, path


async def test_explanations_name_buttons_instead_of_functions(engine: sa.Engine, client_of: Any) -> None:
    model = make_job("update_status")
    create(engine, model)
    add(engine, model(id=1, key="a"))
    fail_jobs(engine, model, error="ValueError: requeue() is no good")
    async with client_of(model) as browser:
        assert (
            "requeue() is no good&#39;; Requeue makes it pending again."
            in (await browser.get("/queues/job/job?key=1")).text
        )
        add(engine, model(id=2, key="a"))
        assert (
            "; Requeue does not make it pending again while its twin"
            in (await browser.get("/queues/job/job?key=1")).text
        )
