"""How the result of a handler becomes the outcome of its run, without a database."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlaqueue import Cancel, Constant, Fail, Retry, Snooze
from sqlaqueue.consumer.outcomes import (
    LONGEST_DELAY,
    RELEASED,
    CancellationRequested,
    HandlerAbandoned,
    applies_to_batch,
    outcome_of,
)
from sqlaqueue.queue.run import Run

pytestmark = pytest.mark.once

attempts = st.integers(1, 10_000)
durations = st.one_of(st.just(0.0), st.floats(1e-6, 1e9), st.timedeltas(timedelta(0), timedelta(days=10_000)))
errors = st.one_of(
    st.builds(Retry, st.one_of(st.none(), durations, st.just(-1), st.just("soon")), st.one_of(st.none(), st.text())),
    st.builds(Snooze, st.one_of(durations, st.just(float("nan")))),
    st.builds(Fail, st.text()),
    st.builds(Cancel, st.text()),
    st.builds(ValueError, st.text(st.characters(exclude_categories=()))),
    st.sampled_from([SystemExit(1), KeyboardInterrupt(), HandlerAbandoned(), CancellationRequested({(1,)})]),
)
policies = st.sampled_from([Constant(), lambda *_: None, lambda *_: -1, lambda *_: 1 / 0, lambda *_: 1e300])


def run_of(attempt: int, max_attempts: int) -> Run:
    return Run((1,), None, attempt, max_attempts, None)


@given(errors, attempts, attempts, policies, st.booleans())
def test_a_run_has_an_outcome_whatever_was_raised(
    error: BaseException,
    attempt: int,
    max_attempts: int,
    policy: Any,
    has_run_at: bool,  # noqa: FBT001 - drawn
) -> None:
    outcome = outcome_of(error, run_of(attempt, max_attempts), policy, has_run_at=has_run_at)
    assert outcome.event != "completed"
    assert outcome.delay is None or (has_run_at and 0 <= outcome.delay <= LONGEST_DELAY)
    if outcome.event == "retried":
        assert attempt < max_attempts
    if outcome.error is not None:
        outcome.error.encode()
        assert "\0" not in outcome.error
    # The settlement can be built: nothing raises later, when other runs are settled with it.
    outcome.settlement()


@given(attempts, attempts)
def test_attempts_are_limited(attempt: int, max_attempts: int) -> None:
    outcome = outcome_of(ValueError(), run_of(attempt, max_attempts), Constant(delay=1))
    assert outcome.event == ("failed" if attempt >= max_attempts else "retried")


def test_an_abandoned_run_is_released_even_at_its_last_attempt() -> None:
    assert outcome_of(HandlerAbandoned(), run_of(3, 3), Constant()) is RELEASED


def test_an_error_of_a_batch_handler_applies_to_the_batch_or_to_some_of_its_jobs() -> None:
    assert all(map(applies_to_batch, [Retry(), Snooze(1), Fail(), Cancel(), HandlerAbandoned()]))
    assert not any(map(applies_to_batch, [ValueError(), SystemExit(), CancellationRequested({(1,)})]))
