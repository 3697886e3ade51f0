"""Every text of the database is code: no page executes it, or takes it for elements of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sqlalchemy as sa

from tests.web.browser.chromium import View
from tests.web.browser.paths import FAILED, PAGES, RUNNING
from tests.web.browser.site import Site

CODE = (
    "</title></textarea></pre></style>\"'><img src=x onerror=window.executed=1><svg onload=window.executed=1></svg>"
    "<script>window.executed=1</script><a href=javascript:window.executed=1>x</a>{{7*7}}<!--"
)

KEPT = {"status", "queue", "name", "state", "outcome", "timezone", "cron", "token", "lease_token", "channel"}
"""Columns by whose values rows are found."""

INJECTED = (
    "() => document.querySelectorAll('img, script:not([src]), a[href^=javascript], svg[onload], [onerror]').length"
)


def poison(site: Site) -> int:
    """Write code into all texts, and return the number of columns."""
    written = 0
    columns = site.execute(
        "SELECT table_name, column_name, data_type FROM information_schema.columns WHERE table_schema = 'public' "
        "AND data_type IN ('text', 'character varying', 'jsonb') ORDER BY 1, 2"
    )
    for table, column, kind in columns:
        if column in KEPT:
            continue
        value = "jsonb_build_object(CAST(:code AS text), CAST(:code AS text))" if kind == "jsonb" else ":code"
        try:
            changed = site.execute(f'UPDATE "{table}" SET "{column}" = {value}', code=CODE)
        except sa.exc.DBAPIError:
            continue  # a unique or a short one
        written += changed > 0
    return written


@pytest.mark.parametrize("javascript", [True, False])
def test_no_page_executes_a_value(open_view: Callable[..., View], own_site: Site, *, javascript: bool) -> None:
    assert poison(own_site) > 10
    own_site.execute("UPDATE sqlaqueue_consumer SET name = :code", code=CODE)
    own_site.execute("UPDATE sqlaqueue_schedule SET name = :code WHERE name = 'heartbeat'", code=CODE)
    view = open_view(own_site, javascript=javascript)
    paths = [
        *PAGES.values(),
        f"queues/email/job?key={RUNNING}",
        "queues/report",
        "queues/report/jobs",
        "queues/invoice",
    ]
    paths += [
        "queues/email/jobs?columns=subject,to,last_error,claimed_by",
        f"queues/email/confirm?action=purge&key={FAILED}",
    ]
    seen = 0
    for path in paths:
        view.open(path)
        if not javascript:
            assert "<img" not in view.page.content(), path
            continue
        view.settle()
        assert view.run(INJECTED) == 0, path
        assert view.run("() => window.executed === undefined"), path
        seen += "onerror=window.executed" in view.text()
        view.check()
    assert seen >= 5 or not javascript
