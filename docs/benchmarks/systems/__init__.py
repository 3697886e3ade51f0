"""The systems that are compared. A program in this folder runs each; :mod:`.protocol` specifies its commands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

PSYCOPG = "psycopg[binary]==3.3.9"
SELF = "sqlaqueue"
"""This source tree, installed as editable."""
SQLALCHEMY_ASYNC = "sqlalchemy[asyncio]==2.1.9"
NODE_PG = "pg@8.16.3"


@dataclass(frozen=True)
class System:
    """A queue with its settings.

    :param name: unique; the first word is the family.
    :param program: the file in this folder that runs it.
    :param requirements: the packages of its environment, pinned.
    :param options: the options of its program.
    :param fair: a description of tuned settings, for the table.
    :param workloads: the only workloads that it takes part in; empty for all but those about flow control and faults.
    """

    name: str
    program: str
    requirements: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    fair: str = ""
    workloads: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """The name of the project."""
        return self.name.split()[0]

    @property
    def environment(self) -> str:
        """The name of its environment, shared by systems with the same program."""
        return self.program.partition(".")[0]

    @property
    def is_node(self) -> bool:
        """Whether its program is written for Node."""
        return self.program.endswith(".mjs")

    @property
    def tuned(self) -> bool:
        """Whether it has tuned settings instead of its defaults."""
        return bool(self.options.get("tuned"))


def _both(name: str, program: str, requirements: tuple[str, ...], fair: str) -> list[System]:
    """Return a system with its defaults, and one with tuned settings."""
    return [
        System(f"{name} (defaults)", program, requirements, {"tuned": False}),
        System(f"{name} (tuned)", program, requirements, {"tuned": True}, fair),
    ]


def _raw() -> list[System]:
    needs = (PSYCOPG,)
    made = [
        System(f"raw {ending} {batch}", "raw_sql.py", needs, {"ending": ending, "batch": batch, "tuned": True})
        for ending, batch in product(("delete", "update"), (1, 10, 100, 1000))
    ]
    made.append(System("raw listen", "raw_sql.py", needs, {"ending": "delete", "batch": 1, "listen": True}))
    return made


TUNED: dict[str, Any] = {"batch_size": 1500, "batch": True, "concurrency": 3}
"""The arguments of tuned Consumers, in a process with the interpreter settings of the command `worker`."""


def _same_statements() -> list[System]:
    """Return psycopg with the statements of sqlaqueue, without and with instances of SQLAlchemy."""
    return [
        System(
            f"replay {strategy} {on_complete} {batch}{' instances' * orm}",
            "statement_replay.py",
            (SELF, SQLALCHEMY_ASYNC, PSYCOPG),
            {"strategy": strategy, "on_complete": on_complete, "batch": batch, "tuned": True, "orm": orm},
        )
        for strategy, on_complete, batch, orm in product(
            STRATEGIES, ("keep", "delete"), (100, TUNED["batch_size"]), (False, True)
        )
    ]


STRATEGIES = ("update_status", "delete_returning", "batch_select")

HELD: dict[str, Any] = {"concurrency": 2}
"""The arguments for strategies that hold a transaction, where each thread needs a connection."""

SEVERAL_PROCESSES: dict[str, Any] = {"concurrency": 1}
"""The arguments for each of several processes, which need no threads to claim and run jobs at the same time."""


def _description(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in arguments.items())


def _sqlaqueue() -> list[System]:
    made = []
    for strategy, kind, on_complete, tuned in product(STRATEGIES, ("sync", "async"), ("keep", "delete"), (False, True)):
        options = {"strategy": strategy, "kind": kind, "on_complete": on_complete, "tuned": tuned}
        how = "tuned" if tuned else "defaults"
        best = TUNED if strategy == "update_status" else TUNED | HELD
        made.append(
            System(
                f"sqlaqueue {strategy} {kind} {on_complete} ({how})",
                "sqlaqueue_consumer.py",
                (SELF, SQLALCHEMY_ASYNC, PSYCOPG),
                options | ({"consumer": best, "several_processes": SEVERAL_PROCESSES} if tuned else {}),
                f"{_description(best)}; of several processes each {_description(SEVERAL_PROCESSES)}" if tuned else "",
            )
        )
    return made


PLAIN = System(
    "sqlalchemy plain",
    "sqlaqueue_consumer.py",
    (SELF, SQLALCHEMY_ASYNC, PSYCOPG),
    {"plain": True},
)
"""SQLAlchemy with a table that is not a queue."""

BARE = System(
    "sqlalchemy with the columns of a queue",
    "sqlaqueue_consumer.py",
    (SELF, SQLALCHEMY_ASYNC, PSYCOPG),
    {"bare": True, "strategy": "update_status", "on_complete": "keep"},
)
"""A table with the columns of a queue, but without its indexes, triggers and side tables."""


FLOW: dict[str, dict[str, Any]] = {
    "ConcurrencyLimit(2) of each key": {"kind": "limit", "most": 2, "per_key": True},
    "ConcurrencyLimit(1) of each key": {"kind": "limit", "most": 1, "per_key": True},
    "ConcurrencyLimit(4) of the queue": {"kind": "limit", "most": 4, "per_key": False},
    "InOrder": {"kind": "order", "most": 1, "per_key": True},
    "FairShare": {"kind": "fair", "per_key": True},
    "RateLimit(500) of each key": {"kind": "rate", "most": 500, "per_key": True},
}
"""The option ``flow``: what is limited, how many, and whether for each key. A rate is for each second."""


def _flow_control() -> Iterator[System]:
    """Yield the systems that limit what runs, each with one of the ways in which it can."""
    needs = (SELF, SQLALCHEMY_ASYNC, PSYCOPG)
    for what, flow in FLOW.items():
        options = {"strategy": "update_status", "kind": "sync", "on_complete": "delete", "flow": flow}
        yield System(f"sqlaqueue {what}", "sqlaqueue_consumer.py", needs, options, workloads=("flow", "flow_claims"))
    peers = {
        "procrastinate lock": ("procrastinate.py", "InOrder"),
        "pgqueuer concurrency_limit=4": ("pgqueuer.py", "ConcurrencyLimit(4) of the queue"),
        "pgqueuer concurrency_limit=2, 1,000 entry points": ("pgqueuer.py", "ConcurrencyLimit(2) of each key"),
        "graphile-worker queue names": ("graphile_worker.mjs", "InOrder"),
        "graphile-worker queue names, no local queue": ("graphile_worker.mjs", "InOrder"),
    }
    for name, (program, what) in peers.items():
        options = {"tuned": True, "flow": FLOW[what]}
        if name.endswith("no local queue"):
            options["local_queue"] = False
        yield System(name, program, REQUIREMENTS[program], options, workloads=("flow",))
    plain = {"strategy": "update_status", "kind": "sync", "on_complete": "delete", "flow": None}
    yield System("sqlaqueue plain", "sqlaqueue_consumer.py", needs, plain, workloads=("flow_claims",))


LEASE = 10.0
"""Seconds after which the jobs of a dead process may run again, in the systems of the workload about faults."""


def _under_faults() -> Iterator[System]:
    """Yield the systems that are put under faults: with the settings for a fast recovery, and with their defaults."""

    def system(name: str, program: str, fair: str, **options: Any) -> System:
        return System(name, program, REQUIREMENTS[program], options, fair, workloads=("faults",))

    raw, ours, procrastinate, pgqueuer = "raw_sql.py", "sqlaqueue_consumer.py", "procrastinate.py", "pgqueuer.py"
    leased = {"strategy": "update_status", "kind": "sync", "on_complete": "keep"}
    held = {"strategy": "batch_select", "kind": "sync", "on_complete": "keep"}
    # The load goes on until their leases have expired, as a job that arrives can be the cause of a look at all jobs.
    slow = {"recovers": False, "after": 75.0}
    twelve = {"max_concurrent_tasks": 12, "batch_size": 6}

    yield system(
        "raw row lock", raw, "the row is locked while its handler runs; a lost connection is replaced", one="locked"
    )
    yield system("raw deleted first", raw, "a control that must lose jobs", one="deleted first", recovers=False)
    yield system("sqlaqueue update_status (lease 10 s)", ours, "`lease=10`", **leased, lease=LEASE)
    yield system("sqlaqueue update_status (default lease)", ours, "`lease=60`", **leased, **slow)
    yield system(
        "sqlaqueue batch_select (batch_size=1)", ours, "`batch_size=1`: one row is locked", **held, held_batch=1
    )
    yield system(
        "sqlaqueue batch_select (default batches)",
        ours,
        "the rows of about a second's jobs are locked",
        **held,
        held_batch=None,
        recovers=False,
    )
    yield system(
        "procrastinate (stalled jobs retried)",
        procrastinate,
        "the task of its guide, every 5 s; stalled after 10 s without a heartbeat; heartbeats every 3.3 s",
        lease=LEASE,
    )
    yield system("procrastinate (default recovery)", procrastinate, "no task that retries stalled jobs", recovers=False)
    yield system(
        "pgqueuer (heartbeat timeout 10 s)",
        pgqueuer,
        "`heartbeat_timeout=10 s`, `shutdown_on_listener_failure=True`, `batch_size=6`, `max_concurrent_tasks=12`",
        lease=LEASE,
        run={**twelve, "shutdown_on_listener_failure": True},
    )
    yield system(
        "pgqueuer (default recovery)",
        pgqueuer,
        "the heartbeat timeout is 30 s; `batch_size=6`, `max_concurrent_tasks=12`",
        run=twelve,
        **slow,
    )


REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "raw_sql.py": (PSYCOPG,),
    "sqlaqueue_consumer.py": (SELF, SQLALCHEMY_ASYNC, PSYCOPG),
    "procrastinate.py": ("procrastinate==3.10.0", PSYCOPG),
    "pgqueuer.py": ("pgqueuer==1.6.0", "asyncpg==0.32.0", "uvloop"),
    "graphile_worker.mjs": ("graphile-worker@0.18.0", NODE_PG),
}
"""The packages of programs that run several systems."""


def _by_name(systems: Iterable[System]) -> dict[str, System]:
    named: dict[str, System] = {}
    for system in systems:
        if system.name in named:
            msg = f"two systems have the name {system.name!r}"
            raise ValueError(msg)
        named[system.name] = system
    return named


SYSTEMS: dict[str, System] = _by_name(
    (
        *_raw(),
        *_same_statements(),
        *_sqlaqueue(),
        PLAIN,
        BARE,
        *_both(
            "procrastinate",
            "procrastinate.py",
            REQUIREMENTS["procrastinate.py"],
            "concurrency 10, finished jobs deleted",
        ),
        *_both(
            "pgqueuer",
            "pgqueuer.py",
            REQUIREMENTS["pgqueuer.py"],
            "batches of 1,000, a pool of four asyncpg connections, uvloop",
        ),
        *_both("chancy", "chancy.py", ("chancy==0.26.0", PSYCOPG), "concurrency 1,000, eager polling"),
        *_both("beanqueue", "beanqueue.py", ("beanqueue==2.0.0rc2", "psycopg2-binary"), "batches of 1,000"),
        *_both(
            "graphile-worker",
            "graphile_worker.mjs",
            REQUIREMENTS["graphile_worker.mjs"],
            "24 jobs at once, a local queue of 2,000, completions gathered for 10 ms",
        ),
        *_both(
            "pg-boss",
            "pg_boss.mjs",
            ("pg-boss@12.35.0", NODE_PG),
            "two loops that fetch 500 and complete them",
        ),
        *_flow_control(),
        *_under_faults(),
    )
)
"""All systems by name, in the order of the tables."""
