"""What decides without a database: the pace, the policies, how a run is judged."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlaqueue import Cancel, Constant, Exponential, Fail, Linear, Retry, Snooze
from sqlaqueue.consumer.claiming.batch_size import HEARTBEATS_A_LEASE, RECONCILE, SWEEP, Agenda, Pace
from sqlaqueue.consumer.settling.outcomes import LONGEST_DELAY, RELEASED, Abandoned, StopRequested, concerns_all, judge
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.postgresql.claims.planner import FEW
from sqlaqueue.queue.retry_policies import seconds
from sqlaqueue.queue.run import Run

pytestmark = pytest.mark.once

jitters = st.floats(0, 1)
delays = st.one_of(st.just(0.0), st.floats(1e-6, 1e9))
attempts = st.integers(1, 10_000)
spans = st.one_of(delays, st.timedeltas(timedelta(0), timedelta(days=10_000)))


def run_of(attempt: int, max_attempts: int) -> Run:
    return Run((1,), None, attempt, max_attempts, None)


# -- policies --------------------------------------------------------------------------------------------------


@given(delays, delays, jitters, attempts)
def test_every_policy_keeps_within_its_jitter_and_its_cap(
    delay: float, cap: float, jitter: float, attempt: int
) -> None:
    for policy, full in (
        (Constant(delay=delay, jitter=jitter, cap=cap), delay),
        (Linear(step=delay, jitter=jitter, cap=cap), delay * attempt),
        (Exponential(base=delay, factor=2, jitter=jitter, cap=cap), delay * 2.0 ** min(attempt - 1, 900)),
    ):
        longest = min(full, cap)
        assert longest * (1 - jitter) * 0.999 <= policy(attempt, ValueError()) <= longest


@given(spans)
def test_spans_are_seconds_or_timedeltas(span: Any) -> None:
    assert seconds(span) == (span.total_seconds() if isinstance(span, timedelta) else span)


@pytest.mark.parametrize("span", [-1, float("nan"), float("inf"), True, "1", None, timedelta(seconds=-1)])
def test_other_spans_are_refused(span: Any) -> None:
    with pytest.raises(ConfigurationError, match="the delay must be seconds"):
        seconds(span, "the delay")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Constant(jitter=-0.1),
        lambda: Constant(jitter=1.1),
        lambda: Linear(step=-1),
        lambda: Exponential(base=float("nan")),
        lambda: Exponential(factor=0.5),
        lambda: Exponential(factor=float("nan")),
        lambda: Constant(cap=-1),
    ],
)
def test_policies_that_cannot_be_meant_are_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_the_first_argument_of_a_policy_is_its_delay() -> None:
    assert Constant(0.3) == Constant(delay=0.3)
    assert Linear(0.3) == Linear(step=0.3)
    assert Exponential(0.3) == Exponential(base=0.3)
    for policy in (Constant, Linear, Exponential):
        with pytest.raises(TypeError, match="positional argument"):
            policy(0.3, 2)  # type: ignore[operator] # one of three classes


# -- judging ---------------------------------------------------------------------------------------------------

signals = st.one_of(
    st.builds(Retry, st.one_of(st.none(), spans, st.just(-1), st.just("soon")), st.one_of(st.none(), st.text())),
    st.builds(Snooze, st.one_of(spans, st.just(float("nan")))),
    st.builds(Fail, st.text()),
    st.builds(Cancel, st.text()),
    st.builds(ValueError, st.text(st.characters(exclude_categories=()))),
    st.sampled_from([SystemExit(1), KeyboardInterrupt(), Abandoned(), StopRequested({(1,)})]),
)
policies = st.sampled_from([Constant(), lambda *_: None, lambda *_: -1, lambda *_: 1 / 0, lambda *_: 1e300])


@given(signals, attempts, attempts, policies, st.booleans())
def test_a_run_ends_whatever_was_raised(
    error: BaseException,
    attempt: int,
    most: int,
    policy: Any,
    has_run_at: bool,  # noqa: FBT001 - drawn
) -> None:
    outcome = judge(error, run_of(attempt, most), policy, has_run_at=has_run_at)
    assert outcome.ending != "completed"
    assert outcome.delay is None or (has_run_at and 0 <= outcome.delay <= LONGEST_DELAY)
    if outcome.ending == "retried":
        assert attempt < most
    if outcome.error is not None:
        outcome.error.encode()
        assert "\0" not in outcome.error
    # What is written can be built: nothing raises later, when others wait to be settled with it.
    outcome.settlement()


@given(attempts, attempts)
def test_attempts_end(attempt: int, most: int) -> None:
    outcome = judge(ValueError(), run_of(attempt, most), Constant(delay=1))
    assert outcome.ending == ("failed" if attempt >= most else "retried")


def test_an_abandoned_run_is_given_back_even_at_its_last_attempt() -> None:
    assert judge(Abandoned(), run_of(3, 3), Constant()) is RELEASED


def test_what_a_batch_handler_raises_is_about_all_or_about_some() -> None:
    assert all(map(concerns_all, [Retry(), Snooze(1), Fail(), Cancel(), Abandoned()]))
    assert not any(map(concerns_all, [ValueError(), SystemExit(), StopRequested({(1,)})]))


# -- the pace --------------------------------------------------------------------------------------------------


def make_pace(draw: float = 0.5, batch_size: int = 100, concurrency: int = 1, *, whole: bool = False) -> Pace:
    return Pace(batch_size, concurrency, 1.0, whole=whole, draw=lambda: draw)


@given(st.floats(0, 0.999), st.integers(1, 5000))
def test_a_consumer_is_back_within_five_seconds(draw: float, failures: int) -> None:
    """However long the database was away; and it does not hammer it meanwhile."""
    pace = make_pace(draw)
    waits = [pace.failed() for _ in range(min(failures, 50))]
    assert all(0.1 <= wait <= 3.0 for wait in waits)
    assert waits == sorted(waits)
    pace.succeeded()
    assert pace.failed() <= 0.2


def test_consumers_do_not_come_back_in_step() -> None:
    early, late = make_pace(0), make_pace(0.999)
    for _ in range(20):
        assert late.failed() > early.failed() * 1.5
    assert late.poll() > early.poll()
    assert late.sweep(0) > early.sweep(0)


@given(st.floats(0, 0.999), st.integers(0, 1000))
def test_an_expired_lease_is_found_within_five_seconds(draw: float, rank: int) -> None:
    assert SWEEP <= make_pace(draw).sweep(rank) < 5 - 1


@given(st.integers(1, 1000), st.integers(1, 64), st.lists(st.floats(0, 10_000), max_size=20))
def test_a_claim_is_never_larger_than_asked_for_and_never_empty(
    batch_size: int, concurrency: int, durations: list[float]
) -> None:
    pace = make_pace(batch_size=batch_size, concurrency=concurrency)
    assert pace.claim_size() == min(batch_size, concurrency)
    for duration in durations:
        pace.ended(duration, quiet=True)
        assert min(batch_size, concurrency) <= pace.claim_size() <= batch_size


def test_slow_handlers_claim_no_more_than_they_can_do() -> None:
    pace = make_pace(concurrency=4)
    for _ in range(50):
        pace.ended(10, quiet=True)
    assert pace.claim_size() == 4
    assert pace.is_slow
    for _ in range(100):
        pace.ended(0.001, quiet=True)
    assert pace.claim_size() == 100
    assert not pace.is_slow


def test_a_few_are_claimed_where_there_may_be_no_more() -> None:
    """But never fewer than there are handlers."""
    for concurrency, few in ((4, FEW), (40, 40)):
        pace = make_pace(concurrency=concurrency)
        pace.ended(0.001, quiet=True)
        assert (pace.claim_size(plenty=False), pace.claim_size()) == (few, 100)


def test_a_handler_of_batches_gets_whole_ones() -> None:
    pace = make_pace(whole=True)
    pace.ended(10, quiet=True)
    assert pace.claim_size(plenty=False) == pace.claim_size() == 100


@given(st.floats(0, 0.999), st.floats(0, 1000))
def test_reconciling_takes_a_hundredth_of_the_time(draw: float, took: float) -> None:
    wait = make_pace(draw).reconcile(took)
    assert wait >= 0.9 * RECONCILE
    assert wait >= 89 * took


@given(st.floats(0, 1000))
def test_a_comparison_takes_a_twentieth_of_the_time_where_nothing_is_wrong(took: float) -> None:
    pace = make_pace()
    assert took <= (pace.between_parts(took, found=False) + took) / 19.99
    assert pace.between_parts(took, found=True) == pace.between_batches(took) >= 4 * took


def test_one_heartbeat_may_be_lost() -> None:
    assert HEARTBEATS_A_LEASE >= 3


@given(st.dictionaries(st.sampled_from("abc"), st.floats(0, 100)), st.floats(0, 100))
def test_the_agenda_knows_what_is_due(due: dict[str, float], now: float) -> None:
    agenda = Agenda()
    for what, at in due.items():
        agenda.set(what, at)
    for what in "abc":
        assert agenda.due(what, now) == (what in due and due[what] <= now)
    wait = agenda.wait(now)
    assert wait >= 0
    assert (wait == 0) == any(agenda.due(what, now) for what in "abc")
