"""Who is measured: data only. One file beside this one drives each; `protocol` says how they are spoken to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

PSYCOPG = "psycopg[binary]==3.3.9"
SELF = "sqlaqueue"
"""This very tree, installed so that it is edited in place."""
SQLALCHEMY_ASYNC = "sqlalchemy[asyncio]==2.1.9"
NODE_PG = "pg@8.16.3"


@dataclass(frozen=True)
class Contestant:
    """One way to run a queue, which is compared with others.

    :param name: unique; what stands before the first space is the family.
    :param program: the file beside this one that drives it.
    :param requirements: what its environment holds, pinned.
    :param options: what its program is told.
    :param fair: how its best settings drive it, in words for the table.
    """

    name: str
    program: str
    requirements: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    fair: str = ""

    @property
    def family(self) -> str:
        """The project."""
        return self.name.split()[0]

    @property
    def environment(self) -> str:
        """The name of its environment, which contestants with the same program share."""
        return self.program.partition(".")[0]

    @property
    def is_node(self) -> bool:
        """Whether its program is written for Node."""
        return self.program.endswith(".mjs")

    @property
    def tuned(self) -> bool:
        """Whether it is driven as well as we know, and not by its defaults."""
        return bool(self.options.get("tuned"))


def _both(name: str, program: str, requirements: tuple[str, ...], fair: str) -> list[Contestant]:
    """Return a contestant with its defaults and one with its best settings."""
    return [
        Contestant(f"{name} (defaults)", program, requirements, {"tuned": False}),
        Contestant(f"{name} (tuned)", program, requirements, {"tuned": True}, fair),
    ]


def _raw() -> list[Contestant]:
    needs = (PSYCOPG,)
    made = [
        Contestant(f"raw {ending} {batch}", "raw.py", needs, {"ending": ending, "batch": batch, "tuned": True})
        for ending, batch in product(("delete", "update"), (1, 10, 100, 1000))
    ]
    made.append(Contestant("raw listen", "raw.py", needs, {"ending": "delete", "batch": 1, "listen": True}))
    return made


TUNED: dict[str, Any] = {"batch_size": 1500, "batch": True, "concurrency": 3}
"""How a Consumer is driven at its best, in a process that freezes what it has loaded, as the command `worker` does."""


def _same_statements() -> list[Contestant]:
    """Psycopg with the statements of sqlaqueue, and with instances of SQLAlchemy: what is between is their price."""
    return [
        Contestant(
            f"replay {strategy} {on_complete} {batch}{' instances' * orm}",
            "replay.py",
            (SELF, SQLALCHEMY_ASYNC, PSYCOPG),
            {"strategy": strategy, "on_complete": on_complete, "batch": batch, "tuned": True, "orm": orm},
        )
        for strategy, on_complete, batch, orm in product(
            STRATEGIES, ("keep", "delete"), (100, TUNED["batch_size"]), (False, True)
        )
    ]


STRATEGIES = ("update_status", "delete_returning", "batch_select")

HELD: dict[str, Any] = {"concurrency": 2}
"""What else holds where a transaction holds the jobs: each thread then has a connection for as long as it works."""

TOGETHER: dict[str, Any] = {"concurrency": 1}
"""What else holds for each of several processes: one claims while another one works, and threads have no part in it."""


def _in_words(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in arguments.items())


def _ours() -> list[Contestant]:
    made = []
    for strategy, kind, on_complete, tuned in product(STRATEGIES, ("sync", "async"), ("keep", "delete"), (False, True)):
        options = {"strategy": strategy, "kind": kind, "on_complete": on_complete, "tuned": tuned}
        how = "tuned" if tuned else "defaults"
        best = TUNED if strategy == "update_status" else TUNED | HELD
        made.append(
            Contestant(
                f"sqlaqueue {strategy} {kind} {on_complete} ({how})",
                "ours.py",
                (SELF, SQLALCHEMY_ASYNC, PSYCOPG),
                options | ({"consumer": best, "together": TOGETHER} if tuned else {}),
                f"{_in_words(best)}; of several processes each {_in_words(TOGETHER)}" if tuned else "",
            )
        )
    return made


PLAIN = Contestant(
    "sqlalchemy plain",
    "ours.py",
    (SELF, SQLALCHEMY_ASYNC, PSYCOPG),
    {"plain": True},
)
"""SQLAlchemy with a table that is no queue."""

BARE = Contestant(
    "sqlalchemy with the columns of a queue",
    "ours.py",
    (SELF, SQLALCHEMY_ASYNC, PSYCOPG),
    {"bare": True, "strategy": "update_status", "on_complete": "keep"},
)
"""The rows of a queue, in a table without the indexes, triggers and side tables of one."""


CONTESTANTS: dict[str, Contestant] = {
    each.name: each
    for each in (
        *_raw(),
        *_same_statements(),
        *_ours(),
        PLAIN,
        BARE,
        *_both(
            "procrastinate",
            "procrastinate.py",
            ("procrastinate==3.10.0", PSYCOPG),
            "concurrency 10, finished jobs deleted",
        ),
        *_both(
            "pgqueuer",
            "pgqueuer.py",
            ("pgqueuer==1.6.0", "asyncpg==0.32.0", "uvloop"),
            "batches of 1,000, a pool of four asyncpg connections, uvloop",
        ),
        *_both("chancy", "chancy.py", ("chancy==0.26.0", PSYCOPG), "concurrency 1,000, eager polling"),
        *_both("beanqueue", "beanqueue.py", ("beanqueue==2.0.0rc2", "psycopg2-binary"), "batches of 1,000"),
        *_both(
            "graphile-worker",
            "graphile_worker.mjs",
            ("graphile-worker@0.18.0", NODE_PG),
            "24 jobs at once, a local queue of 2,000, completions gathered for 10 ms",
        ),
        *_both(
            "pg-boss",
            "pg_boss.mjs",
            ("pg-boss@12.35.0", NODE_PG),
            "two loops that fetch 500 and complete them",
        ),
    )
}
"""Every contestant by its name, in the order of the tables."""
