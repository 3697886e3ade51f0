"""What the page of a job shows of the jobs that it waits for, and of those that wait for it."""

import re
from html import unescape
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import claim, fail
from sqlaqueue.web import Access
from sqlaqueue.web.data import waits
from tests.models import execute, new_base, sent_statements
from tests.strategies.conftest import nodes_of
from tests.waits.models import STRATEGIES, job_class, make_batch, make_dependent, make_tree
from tests.web.conftest import ask, follow, hidden
from tests.web.jobs import XSS, plan_of


def enqueue(engine: sa.Engine, *jobs: Any) -> None:
    type(jobs[0]).metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all(jobs)
        session.commit()


def fail_first(engine: sa.Engine, model: Any, number: int = 1, error: str = "ValueError: no stock") -> None:
    with Session(engine) as session:
        session.execute(fail(session.scalars(claim(model, number)).all(), error=error))
        session.commit()


async def page(browser: Any, path: str) -> str:
    response = await browser.get(path)
    assert response.status_code == 200, response.text
    return str(response.text)


def panel(text: str, name: str) -> str:
    """Return the HTML of a panel; empty without one."""
    found = re.search(rf'<section id="{name}".*?</section>', text, re.DOTALL)
    return "" if found is None else found[0]


def words(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def links(html: str) -> list[str]:
    return [unescape(each) for each in re.findall(r'href="([^"]*)"', html)]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_batch_shows_its_members_by_state(engine: sa.Engine, strategy: str) -> None:
    batch, member = make_batch(config={"strategy": strategy}, members={"strategy": strategy})
    enqueue(engine, batch(id=1, members=[member() for _ in range(30)]), batch(id=2, members=[member()]))
    fail_first(engine, member, 2, error=XSS)
    browser = ask(engine, batch, member)
    members = panel(await page(browser, "/queues/batch/job?key=1"), "job-members-1")
    assert "Members: members" in words(members)
    assert "2 of 30 ended, 2 failed" in words(members)
    assert "pending 28 failed 2" in words(members)
    assert members.count('scope="row"') == waits.MOST_SHOWN
    assert [each for each in links(members) if "/job?" in each][:3] == [
        f"../../queues/member/job?key={key}" for key in (1, 2, 3)
    ]
    assert XSS not in members
    assert "All 30 jobs" in words(members)
    failed = next(each for each in links(members) if "state=failed" in each)
    listed = await page(browser, f"/queues/batch/{failed}")
    assert set(re.findall(r"member/job\?key=(\d+)", listed)) == {"1", "2"}


async def test_the_failed_members_are_requeued_by_one_form(engine: sa.Engine, audit: Any) -> None:
    batch, member = make_batch()
    enqueue(
        engine, batch(id=1, members=[member() for _ in range(4)]), batch(id=2, members=[member() for _ in range(2)])
    )
    fail_first(engine, member, 6)
    execute(engine, "UPDATE member SET status = 'completed' WHERE id = 4")
    browser = ask(engine, batch, member)
    members = panel(await page(browser, "/queues/batch/job?key=1"), "job-members-1")
    form = re.search(r'<form class="inline" method="get" action="([^"]*confirm)">(.*?)</form>', members, re.DOTALL)
    assert form is not None
    assert "Requeue the failed members…" in words(form[2])
    preview = await browser.get(f"/queues/batch/{form[1]}", params=hidden(form[2]))
    assert "Requeue 3 jobs?" in words(preview.text)
    assert "failed 3 will be pending again" in words(preview.text)
    done = await browser.post("/queues/member/actions/requeue", data=dict(hidden(preview.text)))
    after = await follow(browser, done)
    assert "3 jobs are pending again." in words(after.text)
    assert set(re.findall(r"member/job\?key=(\d+)", after.text)) == {"1", "2", "3", "4"}
    assert execute(engine, "SELECT string_agg(status, ' ' ORDER BY id) FROM member") == (
        "pending pending pending completed failed failed"
    )
    assert any("action=requeue" in line and "count=3" in line and "f.batch_id" in line for line in audit())
    members = panel(await page(browser, "/queues/batch/job?key=1"), "job-members-1")
    assert "Requeue the failed" not in members


async def test_the_form_needs_the_right_in_the_queue_of_the_members(engine: sa.Engine) -> None:
    batch, member = make_batch()
    enqueue(engine, batch(id=1, members=[member()]))
    fail_first(engine, member)
    shown = {}
    for name, rights in {"none": False, "batch": [batch], "member": [member]}.items():
        browser = ask(engine, batch, member, access=lambda _, rights=rights: Access(read=True, act=rights))
        shown[name] = "Requeue the failed" in await page(browser, "/queues/batch/job?key=1")
        refused = await browser.post("/queues/member/actions/requeue", data={"all": "1"})
        assert (refused.status_code == 403) is not shown[name]
    assert shown == {"none": False, "batch": False, "member": True}


@pytest.mark.parametrize("reads", ["all", "some"])
async def test_no_key_of_a_queue_that_the_user_does_not_see(engine: sa.Engine, reads: str) -> None:
    batch, member = make_batch()
    enqueue(engine, batch(id=471, members=[member(id=815), member(id=816)]))

    def access(_: Any) -> Access:
        return Access(read=True if reads == "all" else [batch], act=True)

    text = await page(ask(engine, batch, member, access=access), "/queues/batch/job?key=471")
    assert ("815" in text) is (reads == "all")
    assert ("you have no access to" in text) is (reads == "some")
    assert ("job-members" in text) is (reads == "all")
    # One that the dashboard does not show at all.
    text = await page(ask(engine, batch), "/queues/batch/job?key=471")
    assert "815" not in text
    assert "Member" not in text
    only_member = ask(engine, batch, member, access=lambda _: Access(read=[member]))
    text = await page(only_member, "/queues/member/job?key=815")
    assert "job-dependents" not in text


async def test_a_reference_to_nothing_is_not_told_as_an_unseen_job(engine: sa.Engine) -> None:
    parent, child = make_dependent()
    enqueue(engine, parent(id=815), child(id=1, a_id=815))
    chain = panel(await page(ask(engine, child), "/queues/child/job?key=1"), "job-waits-for")
    assert words(chain) == "What it waits for This job a: jobs of a queue that you have no access to"


async def test_a_redacted_foreign_key_leads_nowhere(engine: sa.Engine) -> None:
    parent, child = make_dependent()
    enqueue(engine, parent(id=815), child(id=471, a_id=815))
    browser = ask(engine, parent, child, redact=["Child.a_id"])
    text = await page(browser, "/queues/child/job?key=471")
    assert "815" not in text
    assert "This job a: redacted" in words(panel(text, "job-waits-for"))
    assert "471" not in await page(browser, "/queues/parent/job?key=815")


async def test_redacted_errors_of_members_are_not_shown(engine: sa.Engine) -> None:
    batch, member = make_batch()
    enqueue(engine, batch(id=1, members=[member()]))
    fail_first(engine, member, error="ValueError: secret")
    assert "secret" in await page(ask(engine, batch, member), "/queues/batch/job?key=1")
    assert "secret" not in await page(
        ask(engine, batch, member, redact=["Member.last_error"]), "/queues/batch/job?key=1"
    )


async def test_a_chain_is_shown_to_its_end(engine: sa.Engine) -> None:
    node = make_tree(to_many=False)
    enqueue(engine, *(node(id=number, parent_id=number - 1 or None) for number in range(1, 6)))
    fail_first(engine, node)
    browser = ask(engine, node)
    chain = panel(await page(browser, "/queues/node/job?key=4"), "job-waits-for")
    assert words(chain) == (
        "What it waits for This job parent: node 3 waiting node 3 parent: node 2 waiting node 2 parent: node 1 failed"
    )
    assert "../../queues/node/job?key=1" in links(chain)
    text = await page(browser, "/queues/node/job?key=1")
    assert not panel(text, "job-waits-for")
    blocked = panel(text, "job-dependents-1")
    assert "What waits for it: Node.parent waiting 1" in words(blocked)
    assert "../../queues/node/job?key=2" in links(blocked)


async def test_a_long_chain_and_a_circle_end(engine: sa.Engine) -> None:
    node = make_tree(to_many=False)
    enqueue(engine, *(node(id=number, parent_id=number - 1 or None) for number in range(1, 41)))
    browser = ask(engine, node)
    chain = panel(await page(browser, "/queues/node/job?key=40"), "job-waits-for")
    assert chain.count("<li>") == 20
    assert "The chain is longer." in words(chain)
    execute(engine, "UPDATE node SET parent_id = 3 WHERE id = 1")
    chain = panel(await page(browser, "/queues/node/job?key=3"), "job-waits-for")
    assert chain.count("<li>") == 3
    assert "longer" not in chain


async def test_nested_batches(engine: sa.Engine) -> None:
    node = make_tree(to_many=True)
    enqueue(engine, node(id=1), node(id=2, parent_id=1), node(id=3, parent_id=1), node(id=4, parent_id=2))
    browser = ask(engine, node)
    text = await page(browser, "/queues/node/job?key=1")
    chain = words(panel(text, "job-waits-for"))
    assert "This job children: node 2 waiting node 3 pending" in chain
    assert "node 2 children: node 4 pending" in chain
    assert "0 of 2 ended" in words(panel(text, "job-members-1"))
    text = await page(browser, "/queues/node/job?key=2")
    assert "0 of 1 ended" in words(panel(text, "job-members-1"))
    assert "../../queues/node/job?key=1" in links(panel(text, "job-dependents-1"))


async def test_several_parents_of_which_one_has_completed(engine: sa.Engine) -> None:
    parent, child = make_dependent(on_failure="cancel")
    enqueue(engine, parent(id=1), parent(id=2), child(id=1, a_id=1, b_id=2), child(id=2, a_id=1))
    execute(engine, "UPDATE parent SET status = 'completed' WHERE id = 1")
    browser = ask(engine, parent, child)
    chain = words(panel(await page(browser, "/queues/child/job?key=1"), "job-waits-for"))
    assert chain == "What it waits for This job a: parent 1 completed This job b: parent 2 pending"
    chain = words(panel(await page(browser, "/queues/child/job?key=2"), "job-waits-for"))
    assert chain == "What it waits for This job a: parent 1 completed"
    fail_first(engine, parent)
    text = await page(browser, "/queues/parent/job?key=2")
    assert "What waits for it: Child.b cancelled 1" in words(panel(text, "job-dependents-1"))
    assert not panel(text, "job-dependents-2")


@pytest.mark.parametrize("keys", [(sa.Integer, sa.String(20)), (sa.String(20), sa.DateTime(timezone=True)), (sa.Uuid,)])
async def test_keys_of_many_kinds(engine: sa.Engine, keys: Any) -> None:
    values = {
        sa.Integer: 7,
        sa.String: 'a,"b" & c',
        sa.DateTime: sa.func.now(),
        sa.Uuid: sa.func.gen_random_uuid(),
    }
    batch, member = make_batch(keys=keys)
    names = [f"id_{number}" if number else "id" for number in range(len(keys))]
    given = [values[type(key) if not isinstance(key, type) else key] for key in keys]
    batch.metadata.create_all(engine)
    with Session(engine) as session:
        job = batch(**dict(zip(names, given, strict=True)), is_open=True)
        session.add(job)
        session.commit()
        for _ in range(3):
            session.add(member(**{f"batch_{name}": getattr(job, name) for name in names}))
        session.add(member())
        session.commit()
    fail_first(engine, member)
    browser = ask(engine, batch, member)
    listed = await page(browser, "/queues/batch/jobs")
    path = next(each for each in links(listed) if "batch/job?" in each)
    members = panel(await page(browser, f"/queues/batch/{path}"), "job-members-1")
    assert "1 of 3 ended, 1 failed" in words(members)
    pending = next(each for each in links(members) if "state=pending" in each)
    listed = await page(browser, f"/queues/batch/{pending}")
    assert set(re.findall(r"member/job\?key=(\d+)", listed)) == {"2", "3"}
    text = await page(browser, "/queues/member/job?key=1")
    back = next(each for each in links(panel(text, "job-dependents-1")) if "batch/job?" in each)
    assert "1 of 3 ended" in words(await page(browser, f"/queues/member/{back}"))


async def test_an_empty_text_as_a_key_is_no_filter_of_all_members(engine: sa.Engine) -> None:
    batch, member = make_batch(keys=(sa.String(20),))
    enqueue(engine, batch(id="", members=[member()]), batch(id="b", members=[member()]))
    fail_first(engine, member, 2)
    members = panel(await page(ask(engine, batch, member), "/queues/batch/job?key="), "job-members-1")
    assert "1 of 1 ended, 1 failed" in words(members)
    assert not [each for each in links(members) if "/jobs?" in each]
    assert "Requeue the failed" not in members


async def test_a_job_that_nothing_waits_for_and_a_batch_without_members(engine: sa.Engine) -> None:
    batch, member = make_batch()
    enqueue(engine, batch(id=1), member(id=1))
    browser = ask(engine, batch, member)
    text = await page(browser, "/queues/batch/job?key=1")
    assert "No members." in text
    assert not panel(text, "job-waits-for")
    text = await page(browser, "/queues/member/job?key=1")
    assert "job-dependents" not in text


async def test_a_wrong_count_is_told(engine: sa.Engine) -> None:
    batch, member = make_batch()
    enqueue(engine, batch(id=1, members=[member()]), batch(id=2, is_open=True))
    execute(engine, "TRUNCATE member")
    browser = ask(engine, batch, member)
    text = words(await page(browser, "/queues/batch/job?key=1"))
    assert "miscounted All that it waits for has ended" in text
    assert "It waits for" not in text
    text = words(await page(browser, "/queues/batch/job?key=2"))
    assert "open The batch is open" in text
    assert "miscounted" not in text


async def test_a_very_large_batch_is_read_in_part(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, member = make_batch()
    enqueue(engine, batch(id=1, members=[member()]), batch(id=2, members=[member()]))
    execute(engine, "INSERT INTO member (batch_id) SELECT 1 FROM generate_series(1, 20000)")
    execute(engine, "INSERT INTO member (batch_id) SELECT 2 FROM generate_series(1, 1000)")
    execute(engine.execution_options(isolation_level="AUTOCOMMIT"), "VACUUM ANALYZE")
    browser = ask(engine, batch, member)
    with sent_statements(engine) as sent:
        text = await page(browser, "/queues/batch/job?key=1")
    members = words(panel(text, "job-members-1"))
    assert "0 of 10,000 that were read ended" in members
    assert "There may be more than 10,000." in members
    assert "and more than 9,997 more" in words(panel(text, "job-waits-for"))
    assert "Requeue the failed members…" in members
    assert "It waits for 20001 jobs in members." in text
    read = [each for each in sent if "sqlaqueue_other" in each[0]]
    assert len(read) == 4
    # As for plan_of().
    assert "enable_seqscan" in str(sent[: sent.index(read[0])])
    for statement, parameters in read:
        scans = [each for each in nodes_of(plan_of(engine, batch, statement, parameters)) if "Relation Name" in each]
        assert {each["Node Type"] for each in scans} <= {"Index Scan", "Index Only Scan"}
        assert max(each["Actual Rows"] * each["Actual Loops"] for each in scans) <= waits.MOST_READ
    # All that was read has ended, and more is waited for.
    ended = "UPDATE member SET status = 'completed' WHERE batch_id = 1"
    execute(engine, f"{ended}; INSERT INTO member (batch_id) VALUES (1)")
    text = await page(browser, "/queues/batch/job?key=1")
    assert "This job members: the 10,000 jobs that were read have ended" in words(panel(text, "job-waits-for"))
    assert "It waits for 1 job in members." in text
    assert "miscounted" not in text


async def test_plain_queues_cost_no_statement_more(engine: sa.Engine) -> None:
    base = new_base()
    plain = job_class(base, "Plain", {"id": sa.orm.mapped_column(sa.Integer, primary_key=True)})
    enqueue(engine, plain(id=1))
    with sent_statements(engine) as sent:
        text = await page(ask(engine, plain), "/queues/plain/job?key=1")
    assert "job-waits-for" not in text
    assert not [each for each in sent if "sqlaqueue_other" in each[0] or "enable_seqscan" in str(each)]


async def test_a_preview_says_what_becomes_of_waiting_jobs(engine: sa.Engine) -> None:
    batch, member = make_batch()
    enqueue(engine, batch(id=1, members=[member()]))
    browser = ask(engine, batch, member)
    text = words(await page(browser, "/queues/batch/confirm?action=cancel&key=1"))
    assert "Cancel 1 job?" in text
    assert "waiting 1 will be cancelled; members of a batch are cancelled as well" in text
    assert "waiting 1 left alone: waiting already" in words(
        await page(browser, "/queues/batch/confirm?action=requeue&key=1")
    )
