"""When a Consumer polls and tries again, how many jobs it claims and from where on, without a database."""

import random
from collections.abc import Sequence
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.ext.mutable import MutableDict
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import AsyncConsumer, Consumer, QueueConfig, QueueMixin
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.maintenance.state import Timers
from sqlaqueue.consumer.pace import (
    EXTENSIONS_PER_LEASE,
    LATE,
    LONGEST,
    LONGEST_IN_BUFFER,
    RECONCILE,
    RESCUE,
    BatchSizer,
    Intervals,
    RowScale,
    ScanCursor,
    Trail,
)
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.claim_scan import FEW
from tests.consumer.models import models
from tests.consumer.test_arguments import async_handler, async_sessions, handler, sessions

pytestmark = pytest.mark.once

MIB = 2**20


def fill_claims(sizer: BatchSizer) -> None:
    """Record full claims, of which no job had to be released, until claims do not grow by these any more."""
    for _ in range(5):
        size = sizer.claim_size()
        sizer.record_claim(0.0, size, found=size)


def make_intervals(draw: float = 0.5) -> Intervals:
    return Intervals(1.0, draw=lambda: draw)


@given(st.floats(0, 0.999), st.integers(1, 5000))
def test_a_consumer_tries_again_within_three_seconds(draw: float, failures: int) -> None:
    """However long the database was away; and the delays never become shorter meanwhile."""
    intervals = make_intervals(draw)
    delays = [intervals.failed() for _ in range(min(failures, 50))]
    assert all(0.1 <= delay <= 3.0 for delay in delays)
    assert delays == sorted(delays)
    intervals.succeeded()
    assert intervals.failed() <= 0.2


def test_consumers_do_not_run_in_step() -> None:
    early, late = make_intervals(0), make_intervals(0.999)
    for _ in range(20):
        assert late.failed() > early.failed() * 1.5
    assert late.poll() > early.poll()
    assert late.rescue(1) > early.rescue(1)
    assert late.heartbeat(1) > early.heartbeat(1)


@given(st.floats(0, 0.999), st.integers(0, 10_000))
def test_an_expired_lease_is_rescued_within_four_seconds(draw: float, rank: int) -> None:
    """However many consumers are before this one, and if all of them have died."""
    assert RESCUE <= make_intervals(draw).rescue(rank) < 4


@given(st.floats(0, 0.999), st.integers(0, 14))
def test_a_consumer_rescues_later_than_those_before_it(draw: float, rank: int) -> None:
    assert make_intervals(0.999).rescue(rank) < make_intervals(draw).rescue(rank + 1)


@given(st.floats(0, 0.999), st.floats(0, 1000))
def test_reconciling_takes_a_hundredth_of_the_time(draw: float, took: float) -> None:
    wait = make_intervals(draw).reconcile(took)
    assert wait >= 0.9 * RECONCILE
    assert wait >= 89 * took


@given(st.floats(0, 1000))
def test_a_range_takes_a_twentieth_of_the_time_if_nothing_was_repaired(took: float) -> None:
    intervals = make_intervals()
    assert took <= (intervals.between_ranges(took, found=False) + took) / 19.99
    assert intervals.between_ranges(took, found=True) >= 4 * took


@given(st.floats(0, 1000))
def test_deletions_keep_the_server_busy_for_a_tenth_of_the_time(busy: float) -> None:
    """As fast as that allows: there is no pause that does not depend on it."""
    assert make_intervals().between_deletions(busy) == pytest.approx(9 * busy)


def test_one_heartbeat_may_be_lost() -> None:
    assert EXTENSIONS_PER_LEASE >= 3


@given(st.dictionaries(st.sampled_from("abc"), st.floats(0, 100)), st.floats(0, 100))
def test_timers_return_which_tasks_are_due(due: dict[str, float], now: float) -> None:
    timers = Timers()
    for task, at in due.items():
        timers.set(task, at)
    for task in "abc":
        assert timers.is_due(task, now) == (task in due and due[task] <= now)
    wait = timers.until_next(now)
    assert wait >= 0
    assert (wait == 0) == any(timers.is_due(task, now) for task in "abc")


@given(st.integers(1, 1000), st.integers(1, 64), st.lists(st.floats(0, 10_000), max_size=20))
def test_a_claim_is_never_larger_than_the_batch_size_and_never_empty(
    batch_size: int, concurrency: int, durations: list[float]
) -> None:
    sizer = BatchSizer(batch_size, concurrency)
    assert sizer.claim_size() == min(batch_size, concurrency)
    for duration in durations:
        sizer.record_calls(duration, unused=True)
        assert min(batch_size, concurrency) <= sizer.claim_size() <= batch_size


def test_for_slow_handlers_a_claim_takes_one_job_each() -> None:
    sizer = BatchSizer(100, 4)
    for _ in range(50):
        sizer.record_calls(10, unused=True)
    assert sizer.claim_size() == 4
    assert sizer.is_slow
    for _ in range(100):
        sizer.record_calls(0.001, unused=True)
    fill_claims(sizer)
    assert sizer.claim_size() == 100
    assert not sizer.is_slow


@pytest.mark.parametrize(("duration", "size"), [(10, 4), (0.1, 4), (0.01, 8), (0.001, 80)])
def test_jobs_that_count_as_running_are_claimed_when_they_can_begin(duration: float, size: int) -> None:
    sizer = BatchSizer(100, 4, prompt=True)
    assert sizer.claim_size() == 4
    for _ in range(50):
        sizer.record_calls(duration, unused=True)
    fill_claims(sizer)
    assert sizer.claim_size() == pytest.approx(size, abs=1)
    assert sizer.claim_size(idle=1) <= max(1, size)


def test_a_few_jobs_are_claimed_where_there_may_be_no_more() -> None:
    """But never fewer than there are handlers."""
    for concurrency, few in ((4, FEW), (40, 40)):
        sizer = BatchSizer(100, concurrency)
        sizer.record_calls(0.001, unused=True)
        fill_claims(sizer)
        assert (sizer.claim_size(plenty=False), sizer.claim_size()) == (few, 100)


def test_a_fixed_batch_size_is_always_claimed() -> None:
    sizer = BatchSizer(100, 1, fixed=True, most_bytes=float("inf"))
    sizer.record_calls(10, unused=True)
    assert sizer.claim_size(plenty=False) == sizer.claim_size() == 100


@pytest.mark.parametrize("concurrency", [1, 8, 500])
def test_few_jobs_are_buffered_for_slow_handlers(concurrency: int) -> None:
    """Jobs that no handler begins in time would be released again and again."""
    sizer = BatchSizer(500, concurrency)
    assert sizer.claim_size(idle=1) == 1
    sizer.record_calls(2.0, unused=True)
    assert sizer.claim_size(idle=1) == max(1, concurrency // 10)
    assert sizer.claim_size(idle=concurrency) == concurrency


def test_no_jobs_are_claimed_for_slow_handlers() -> None:
    sizer = BatchSizer(500, 4)
    sizer.record_calls(0.1, unused=True)
    fill_claims(sizer)
    assert [sizer.claim_size(idle=1, slow_handlers=slow) for slow in range(5)] == [40, 30, 20, 10, 10]
    assert not sizer.is_slower_than_usual(LONGEST_IN_BUFFER)
    assert sizer.is_slower_than_usual(1.1 * LONGEST_IN_BUFFER)
    sizer.record_calls(20.0, unused=True)
    assert not sizer.is_slower_than_usual(1.1 * LONGEST_IN_BUFFER), "usual calls take as long"


CLAIM = 0.002
"""Seconds that a claim takes here."""

SLOW = {
    "2 % take 0.3 s": (50, 0.3),
    "1 % takes 1.5 s": (100, 1.5),
    "2 % take 3 s": (50, 3.0),
    "all are quick": (0, 0.0),
}


@pytest.mark.parametrize("mix", SLOW)
def test_few_jobs_are_claimed_twice(mix: str) -> None:
    """However few handlers are slow, and however slow these are: one handler runs 20,000 jobs by the rules."""
    one_in, slow = SLOW[mix]
    draw, sizer, jobs, now = random.Random(1), BatchSizer(500, 1), 20_000, 0.0
    waiting = [slow if one_in and not draw.randrange(one_in) else 0.0 for _ in range(jobs)]
    claims = released = 0
    while waiting:
        claims, size = claims + 1, sizer.claim_size()
        claimed = waiting[-size:]
        del waiting[-size:]
        now += CLAIM
        claimed_at = now
        sizer.record_claim(CLAIM, size, found=len(claimed))
        while claimed:
            took = claimed.pop() + 0.0003
            sizer.record_calls(took, unused=True)
            now += took
            if claimed and (took > LONGEST_IN_BUFFER or now - claimed_at > LATE):
                released += len(claimed)
                waiting += claimed
                claimed = []
                sizer.record_released(now)
    # Each job is updated twice, and a released one twice more.
    assert 2 + 2 * released / jobs < 2.3
    assert claims * CLAIM < 0.03 * now


def test_claims_grow_until_jobs_are_released() -> None:
    """By claims that were as large as they might be, and found as many jobs; after a release by little."""
    sizer = BatchSizer(500, 2)
    sizer.record_calls(0.0001, calls=100, unused=True)
    sizes = [sizer.claim_size()]
    for size, found in ((15, 14), (10, 10), (15, 15), (60, 60), (240, 240), (500, 500)):
        sizer.record_claim(0.0, size, found=found)
        sizes.append(sizer.claim_size())
    assert sizes == [15, 15, 15, 60, 240, 500, 500]
    sizer.record_released(100.0)
    sizer.record_released(100.0 + LATE)
    assert sizer.claim_size() == 250, "the jobs of one claim are released one after the other"
    assert sizer.jobs_during_claim() <= 250
    for _ in range(30):
        size = sizer.claim_size()
        sizer.record_claim(0.0, size, found=size)
        assert size <= sizer.claim_size() <= 1.05 * size
    assert sizer.claim_size() == 500
    for number in range(20):
        sizer.record_released(200.0 + 2 * LATE * number)
    assert sizer.claim_size(idle=2) == 2, "each idle handler may have a job"


def test_claims_that_cannot_be_released_begin_small() -> None:
    """And begin again after a slow job."""
    sizer = BatchSizer(500, 1, cautious=True)
    sizes = []
    for _ in range(6):
        sizes.append(sizer.claim_size())
        sizer.record_calls(0.001, calls=sizes[-1], unused=True)
    assert sizes == [1, 15, 64, 320, 500, 500]
    sizer.record_calls(1.1 * LATE, unused=True)
    assert sizer.claim_size() <= 2
    assert sizer.time_in_transaction() == LATE
    assert BatchSizer(500, 1, fixed=True, cautious=True).time_in_transaction() is None


@pytest.mark.parametrize(
    ("strategy", "options", "first", "most"),
    [
        ("update_status", {}, 1, 500),
        ("update_status", {"concurrency": 4}, 4, 500),
        ("update_status", {"concurrency": 1000}, 1000, 1000),
        ("update_status", {"concurrency": 1000, "batch_size": 7}, 7, 7),
        ("update_status", {"batch": True}, FEW, 500),
        ("update_status", {"batch": True, "batch_size": 700}, 700, 700),
        ("delete_returning", {}, 1, 500),
        ("delete_returning", {"concurrency": 4}, 1, 500),
        ("delete_returning", {"batch_size": 7}, 7, 7),
        ("delete_returning", {"batch": True}, FEW, 500),
    ],
)
def test_claims_are_large_where_handlers_are_quick(
    strategy: Any, options: dict[str, int], first: int, most: int
) -> None:
    model = models(strategy).job
    for consumer in (
        Consumer(model, handler, sessions, **options),
        AsyncConsumer(model, async_handler, async_sessions, **options),
    ):
        sizer = consumer._parts.sizer
        assert sizer.claim_size() == first
        sizer.record_weight(first, 100 * first)
        sizer.record_calls(0.0001, calls=500, unused=True)
        fill_claims(sizer)
        assert sizer.claim_size() == most


def test_a_transaction_is_short_where_handlers_are_slow() -> None:
    """Unless the application has said how many jobs commit together."""
    model = models("batch_select").job
    usual, fixed = (
        Consumer(model, handler, sessions, concurrency=4, **options)._parts.sizer for options in ({}, {"batch_size": 7})
    )
    for sizer in (usual, fixed):
        for _ in range(50):
            sizer.record_calls(0.5, unused=True)
    assert usual.claim_size() == 2
    assert fixed.claim_size() == 7


def test_the_next_claim_begins_with_as_many_jobs_left_as_end_during_it() -> None:
    many, one, batches = BatchSizer(100, 50), BatchSizer(100, 1), BatchSizer(100, 50, fixed=True)
    for sizer in (many, one, batches):
        assert sizer.jobs_during_claim() == 0
        for _ in range(50):
            sizer.record_calls(0.1, unused=True)
            sizer.record_claim(0.02, 100, found=0)
    # 500 jobs per second.
    assert 8 <= many.jobs_during_claim() <= 10
    assert one.jobs_during_claim() == batches.jobs_during_claim() == 0
    for _ in range(50):
        many.record_calls(60, unused=True)
    assert many.jobs_during_claim() == 0, "a job would wait here for minutes while other consumers are idle"


def test_a_worker_keeps_the_jobs_of_its_claim_if_handlers_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_IN_ROW_ALONE", 0.1)
    sizer = BatchSizer(100, 1)
    assert sizer.time_in_row(1)
    assert sizer.time_in_row(2) is None
    for _ in range(100):
        sizer.record_calls(0.0001, unused=True)
    assert sizer.time_in_row(100)
    assert sizer.time_in_row(5000), "jobs that are not begun in time are passed on"
    sizer.record_calls(0.0001, unused=False)
    assert sizer.time_in_row(100) is None
    assert sizer.time_in_row(1)
    for _ in range(100):
        sizer.record_calls(0.02, unused=True)
    assert sizer.time_in_row(4)
    assert sizer.time_in_row(100) is None, "other workers could help"


# -- the weight of rows: few heavy ones are claimed at once ---------------------------------------------------------
def quick_sizer(concurrency: int = 1, **options: Any) -> BatchSizer:
    """Return the sizer of quick jobs, of which it would claim 500."""
    sizer = BatchSizer(500, concurrency, **options)
    sizer.record_calls(0.0001, calls=500, unused=True)
    fill_claims(sizer)
    assert sizer.claim_size() == 500
    return sizer


def test_heavy_rows_are_claimed_in_parts() -> None:
    """By what those of the last claims weighed. Lighter ones are believed one by one."""
    sizer = quick_sizer(most_bytes=1000)
    sizer.record_weight(10, 1000)
    assert sizer.claim_size() == 10
    sizer.record_weight(10, 5000)
    assert sizer.claim_size() == 2
    sizer.record_weight(1, 1e9)
    assert sizer.claim_size() == sizer.claim_size(idle=1) == 1
    sizer = quick_sizer(8, most_bytes=1000)
    sizer.record_weight(8, 8000)
    assert sizer.claim_size(idle=8) == 1, "the other handlers get the rows of the next claims"
    assert sizer.jobs_during_claim() <= 1
    sizes, rows = [sizer.claim_size()], 0
    while sizes[-1] < 500:
        sizer.record_weight(sizes[-1], sizes[-1])
        rows += sizes[-1]
        sizes.append(sizer.claim_size())
    assert sizes == sorted(sizes)
    assert 100 < rows < 1000


def test_the_memory_of_mixed_rows_has_a_limit() -> None:
    """Wherever the heavy ones are."""
    draw, sizer, taken = random.Random(1), quick_sizer(most_bytes=1000), []
    for _ in range(500):
        size = sizer.claim_size()
        weight = sum(1000 if draw.random() < 0.05 else 1 for _ in range(size))
        sizer.record_weight(size, weight)
        taken.append(weight)
    # One heavy row fills a claim.
    assert sum(weight > 3000 for weight in taken[1:]) < 10
    assert max(taken[1:]) < 10_000


def test_a_claim_without_an_answer_is_repeated_with_half_as_many_rows() -> None:
    sizer = quick_sizer()
    sizes = []
    for _ in range(10):
        sizes.append(sizer.claim_size())
        sizer.record_failed_claim(sizes[-1])
    assert sizes == [500, 250, 125, 62, 31, 15, 7, 3, 1, 1]
    sizer = quick_sizer()
    sizer.record_failed_claim(500)
    sizer.record_weight(250, 0)
    assert sizer.claim_size() == 500, "it was not the weight of the rows"
    fixed = BatchSizer(100, 1, fixed=True, most_bytes=float("inf"))
    fixed.record_failed_claim(100)
    fixed.record_weight(100, 1e12)
    assert fixed.claim_size() == 100


class Plain:
    """An instance of a class that is not mapped."""

    def __init__(self, **values: Any) -> None:
        self.__dict__ = values


def test_rows_are_weighed_by_what_may_be_large() -> None:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig()
        id: Mapped[int] = mapped_column(primary_key=True)
        short: Mapped[str] = mapped_column(sa.String(100))
        text: Mapped[str]
        data: Mapped[bytes]
        document: Mapped[Any] = mapped_column(sa.JSON)
        array: Mapped[Any] = mapped_column(sa.ARRAY(sa.Numeric))
        pickled: Mapped[Any] = mapped_column(sa.PickleType)

    scale = RowScale([sa.inspect(Job)], spec_of(Job).attributes.values())
    assert scale._names == ["array", "data", "document", "pickled", "text"]
    heavy: list[dict[str, Any]] = [
        {"text": "x" * MIB},
        {"data": b"x" * MIB},
        {"document": {"a": "x" * (MIB // 4)}},
        {"document": MutableDict({"a": ["x" * (MIB // 4)]})},
        {"array": ["x"] * (MIB // 8)},
        {"array": [Decimal(1)] * (MIB // 8)},
    ]
    for values in heavy:
        assert 0.9 * MIB < scale.weigh([Plain(id=1, short="x", **values)], 0.0) < 5 * MIB
    assert scale.weigh([Plain(id=1, short="x" * MIB, last_error="x" * MIB)], 0.0) < 1000
    light = [Plain(text="x")] * 100
    assert scale.weigh(light, 1.0) > 0
    assert scale.weigh(light, 0.001) == 0, "what came in a moment is not looked at"


# -- the scan cursor: claims skip the dead entries at the head of the queue, and miss no job for long --------------
FIRST = {"mark": 1}
SECOND = {"mark": 2}


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cursor(clock: Clock) -> ScanCursor:
    return ScanCursor(clock)


def claim(cursor: ScanCursor, clock: Clock, seconds: float, *, head: float, usual: float = 0.01) -> list[float]:
    """Claim batches of ten for some seconds; return the times of the scans from the head, which take ``head`` seconds."""
    scans, end = [], clock.time + seconds
    while clock.time < end:
        began = cursor.begin()
        took = head if began is None else usual
        scans += [clock.time] if began is None else []
        clock.time += took
        cursor.claimed(began, SECOND, 10, took)
    return scans


def test_every_claim_scans_a_clean_head(cursor: ScanCursor, clock: Clock) -> None:
    assert len(claim(cursor, clock, 10, head=0.01)) == pytest.approx(1000, abs=1)


def test_scans_over_dead_entries_take_a_twentieth_of_the_time(cursor: ScanCursor, clock: Clock) -> None:
    claim(cursor, clock, 1, head=0.01)
    scans = claim(cursor, clock, 60, head=0.1)
    assert 0.02 < len(scans) * 0.09 / 60 < 0.08


def test_a_slow_growth_of_dead_entries_is_noticed(cursor: ScanCursor, clock: Clock) -> None:
    for step in range(200):
        claim(cursor, clock, 0.2, head=0.01 + step * 0.0005)
    assert len(claim(cursor, clock, 10, head=0.11)) < 10


def test_the_head_is_scanned_however_many_dead_entries_it_has(cursor: ScanCursor, clock: Clock) -> None:
    claim(cursor, clock, 1, head=0.01)
    scans = claim(cursor, clock, 60, head=2.0)
    assert max(after - before for before, after in pairwise(scans)) <= 3.1


@pytest.mark.parametrize("head", [0.3, 1.0, 1.7])
def test_a_job_missed_by_one_scan_is_found_in_time_by_the_next(cursor: ScanCursor, clock: Clock, head: float) -> None:
    claim(cursor, clock, 1, head=0.01)
    scans = claim(cursor, clock, 60, head=head)
    assert max(after - before for before, after in pairwise(scans)) == pytest.approx(LONGEST - head, abs=0.1)


def test_one_at_a_time_scans_from_the_head(cursor: ScanCursor, clock: Clock) -> None:
    """Others would read the same dead entries. If that scan never ends, another one begins after a while."""
    claim(cursor, clock, 1, head=0.01)
    assert cursor.begin() is None
    assert cursor.begin() is SECOND
    cursor.claimed(SECOND, SECOND, 10, 0.01)
    clock.time += LONGEST
    assert cursor.begin() is None
    assert cursor.begin() is SECOND
    cursor.claimed(None, SECOND, 10, 0.01)
    assert cursor.begin() is None


# -- the trail: a consumer that keeps up skips the dead entries at the head as well --------------------------------


@pytest.fixture
def trail(clock: Clock) -> Trail:
    return Trail(clock)


def keep_up(
    trail: Trail, clock: Clock, seconds: float, *, head: float, usual: float = 0.005, levels: Sequence[int] = (0,)
) -> list[float]:
    """Claim a few jobs every tenth of a second; return the times of the scans from the head, which take ``head``."""
    scans, end = [], clock.time + seconds
    while clock.time < end:
        began = trail.begin()
        scans += [clock.time] if began is None else []
        took = head if began is None else usual
        clock.time += took
        trail.claimed(began, 5, took)
        place = {"time": clock.time}
        trail.mark({*levels}, lambda place=place: place)
        clock.time += 0.1
    return scans


def test_each_claim_scans_the_head_while_that_is_quick(trail: Trail, clock: Clock) -> None:
    assert len(keep_up(trail, clock, 10, head=0.01)) == pytest.approx(91, abs=1)


@pytest.mark.parametrize("head", [0.1, 0.3, 1.0])
def test_slow_scans_take_a_part_of_the_time_only(trail: Trail, clock: Clock, head: float) -> None:
    keep_up(trail, clock, 5, head=head)
    scans = keep_up(trail, clock, 60, head=head)
    assert len(scans) * head / 60 < 0.3
    assert max(after - before for before, after in pairwise(scans)) <= LONGEST


def test_a_trail_lags_behind_so_that_late_commits_are_found(trail: Trail, clock: Clock) -> None:
    keep_up(trail, clock, 30, head=0.3)
    positions = [began for began in (trail.begin() for _ in range(2)) if began is not None]
    assert positions
    assert all(2.0 <= clock.time - position["time"] <= 4.0 for position in positions)


def test_a_trail_has_jobs_of_one_priority(trail: Trail, clock: Clock) -> None:
    """Behind its position are no jobs of other priorities, so each claim has to look for them from the head."""
    keep_up(trail, clock, 10, head=0.3)
    trail.mark({0, 5}, lambda: {"time": clock.time})
    assert trail.begin() is None
    scans = keep_up(trail, clock, 20, head=0.3, levels=(0, 5))
    assert len(scans) == pytest.approx(50, abs=2)


def test_a_trail_is_left_if_it_is_as_slow_as_the_head(trail: Trail, clock: Clock) -> None:
    """Then the server is busy, and no dead entries are skipped."""
    keep_up(trail, clock, 5, head=0.3)
    scans = keep_up(trail, clock, 20, head=0.3, usual=0.3)
    assert len(scans) == pytest.approx(25, abs=3)


def test_a_claim_waits_for_no_scan_that_is_over(trail: Trail, clock: Clock) -> None:
    keep_up(trail, clock, 5, head=0.3)
    while trail.begin() is not None:
        clock.time += 0.1
    # One scans from the head, and others follow the trail meanwhile.
    assert trail.begin() is not None
    assert trail.until_head > 0
    trail.claimed(None, 5, 0.01)
    assert trail.until_head == 0
    assert trail.begin() is None


def test_no_second_scan_begins_while_a_long_one_runs(cursor: ScanCursor, clock: Clock) -> None:
    """The longer a scan takes, the more a second one would cost."""
    claim(cursor, clock, 1, head=0.01)
    claim(cursor, clock, 20, head=1.2)
    while cursor.begin() is not None:
        clock.time += 0.1
    clock.time += 1.3
    assert cursor.begin() is SECOND
    clock.time += LONGEST
    assert cursor.begin() is None


def test_a_changed_claim_size_scans_the_head(cursor: ScanCursor, clock: Clock) -> None:
    """While a claim is executed that started at the cursor."""
    claim(cursor, clock, 1, head=0.01)
    assert cursor.begin() is None
    assert cursor.begin() is SECOND
    cursor.claimed(None, SECOND, 20, 0.01)
    cursor.claimed(SECOND, SECOND, 20, 0.01)
    assert cursor.begin() is None


def test_single_jobs_are_claimed_from_the_head(cursor: ScanCursor) -> None:
    """A job now and then is no backlog, though a claim of one job has found as many as it might take."""
    cursor.claimed(None, FIRST, 1, 0.01)
    assert cursor.begin() is None
    cursor.claimed(None, None, 0, 0.5)
    cursor.claimed(None, FIRST, 1, 0.5)
    assert cursor.begin() is None


def test_after_the_last_job_the_next_claim_scans_from_the_head(cursor: ScanCursor, clock: Clock) -> None:
    claim(cursor, clock, 1, head=0.01)
    cursor.claimed(None, SECOND, 10, 1.0)
    assert cursor.begin() is SECOND
    cursor.claimed(SECOND, None, 3, 0.01)
    assert cursor.begin() is None
