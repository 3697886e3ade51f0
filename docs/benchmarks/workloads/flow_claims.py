"""Claims under flow control: their buffers and times, where many keys wait, are at their limit, or are drained.

A worker explains each claim of 100 jobs before it is executed. Its first claim is that of a process which knows
nothing of the queue yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import psycopg

from docs.benchmarks.report import quantile
from docs.benchmarks.system_under_test import SystemFailedError, SystemUnderTest
from docs.benchmarks.systems import System
from docs.benchmarks.workloads import Case, Figures, Size

REFERENCE = "sqlaqueue plain"
BATCH = 100
CLAIMS = 50
MANY_KEYS = 10_000
JOBS_OF_A_KEY = 10
FREE_KEYS = 10
DRAINED_KEYS = 1_000
DRAINED_JOBS = 1_000_000
LIMIT = 30.0
"""Seconds after which the claims so far are what is measured."""

Load = Callable[[SystemUnderTest, Size, contextlib.ExitStack], None]


def load_keys(sut: SystemUnderTest, size: Size, _: contextlib.ExitStack) -> None:
    """Load jobs of many keys."""
    keys = size.jobs(MANY_KEYS)
    sut.enqueue(keys * JOBS_OF_A_KEY, way="fill", keys=keys)


def load_full_keys(sut: SystemUnderTest, size: Size, stack: contextlib.ExitStack) -> None:
    """Load the same, and let as many jobs of all keys but ten run as may run."""
    load_keys(sut, size, stack)
    keys, flow = size.jobs(MANY_KEYS), sut.system.options["flow"] or {"most": 1}
    sut.execute(f"{_START} WHERE id <= {keys * flow['most']} AND account < {keys - FREE_KEYS}")


def load_after_drained(sut: SystemUnderTest, size: Size, stack: contextlib.ExitStack) -> None:
    """Load jobs of new keys, after a million jobs of other keys have run, which no VACUUM can remove."""
    sut.enqueue(size.jobs(DRAINED_JOBS), way="fill", keys=DRAINED_KEYS)
    holder = stack.enter_context(psycopg.connect(sut.url))
    stack.callback(holder.rollback)
    holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    holder.execute("SELECT 1")
    # As a claim and a completion do: the first makes new entries in all indexes, and kills the old ones.
    sut.execute(_START)
    sut.execute("DELETE FROM job")
    sut.enqueue(BATCH * CLAIMS, way="fill", keys=DRAINED_KEYS, first_key=DRAINED_KEYS)


_START = """
    UPDATE job SET status = 'processing', attempts = 1, lease_token = gen_random_uuid(),
    lease_expires_at = now() + interval '1 day'
"""


def measure(sut: SystemUnderTest, size: Size, load: Load) -> Figures:
    """Load jobs, and explain claims."""
    with contextlib.ExitStack() as stack:
        load(sut, size, stack)
        sut.end_enqueueing()
        sut.checkpoint()
        consumer = {"batch_size": BATCH, "batch": True}
        with sut.workers(consumer=consumer, explain=1) as workers:
            claims = workers.programs[0].claims
            workers.go()
            workers.wait_until(lambda: len(claims) > CLAIMS + 1, min(size.limit, LIMIT))
            workers.stop()
    # The first statements of a Consumer check the table, and return no jobs.
    begun = next((number for number, one in enumerate(claims) if one["jobs"]), None)
    if begun is None:
        raise SystemFailedError(f"{sut.system.name}: no claim of any jobs has ended within the time")
    seen = claims[begun : begun + CLAIMS]
    busy, idle = [one for one in seen if one["jobs"]], [one for one in seen if not one["jobs"]]
    first, later = busy[0], busy[1:] or busy
    figures = {
        "first_buffers": first["buffers"],
        "first_ms": first["ms"],
        "claims": len(busy),
        "jobs": quantile([one["jobs"] for one in later], 0.5),
        "buffers": quantile([one["buffers"] for one in later], 0.5),
        "ms": quantile([one["ms"] for one in later], 0.5),
        "worst_buffers": max(one["buffers"] for one in later),
        "worst_ms": max(one["ms"] for one in later),
    }
    if idle:
        figures["idle_buffers"] = quantile([one["buffers"] for one in idle], 0.5)
        figures["idle_ms"] = quantile([one["ms"] for one in idle], 0.5)
    return figures


def includes(system: System) -> bool:
    """Return whether a system is there for the claims of its flow control."""
    return "flow_claims" in system.workloads


def fills_keys(system: System) -> bool:
    """Return whether keys of a system can be at their limit, or have no limit at all."""
    flow = system.options.get("flow") or {"kind": "limit", "per_key": True}
    return includes(system) and flow["kind"] in {"limit", "order"} and flow["per_key"]


def is_drained(system: System) -> bool:
    """Return whether a system takes part with drained keys, which take minutes to load."""
    return includes(system) and system.name in {
        REFERENCE,
        "sqlaqueue ConcurrencyLimit(2) of each key",
        "sqlaqueue FairShare",
    }


CASES = [
    Case("10 k keys wait", partial(measure, load=load_keys), includes, REFERENCE),
    Case("10 k keys, all but 10 at their limit", partial(measure, load=load_full_keys), fills_keys, REFERENCE),
    Case("1 M dead entries of drained keys", partial(measure, load=load_after_drained), is_drained, REFERENCE),
]
