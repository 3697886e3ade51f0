"""Retry policies and durations, without a database."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlaqueue import Constant, Exponential, Linear
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.retry_policies import seconds

pytestmark = pytest.mark.once

jitters = st.floats(0, 1)
delays = st.one_of(st.just(0.0), st.floats(1e-6, 1e9))
attempts = st.integers(1, 10_000)
durations = st.one_of(delays, st.timedeltas(timedelta(0), timedelta(days=10_000)))


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


@given(durations)
def test_durations_are_seconds_or_timedeltas(duration: Any) -> None:
    assert seconds(duration) == (duration.total_seconds() if isinstance(duration, timedelta) else duration)


@pytest.mark.parametrize("duration", [-1, float("nan"), float("inf"), True, "1", None, timedelta(seconds=-1)])
def test_other_durations_are_refused(duration: Any) -> None:
    with pytest.raises(ConfigurationError, match="the delay must be seconds"):
        seconds(duration, "the delay")


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
def test_invalid_policies_are_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_the_first_argument_of_a_policy_is_its_delay() -> None:
    assert Constant(0.3) == Constant(delay=0.3)
    assert Linear(0.3) == Linear(step=0.3)
    assert Exponential(0.3) == Exponential(base=0.3)
    for policy in (Constant, Linear, Exponential):
        with pytest.raises(TypeError, match="positional argument"):
            policy(0.3, 2)  # type: ignore[operator] # one of three classes
