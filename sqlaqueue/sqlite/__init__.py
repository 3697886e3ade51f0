"""SQLite as the database of queues: to try the library, for tests, and for a site on one machine.

::

    engine = create_engine("sqlite:///jobs.db")
    sqlaqueue.sqlite.prepare(engine)

Everything else is as with PostgreSQL, except for what is refused; each refusal names the reason.
"""

from sqlaqueue.sqlite.prepare import prepare

__all__ = ["prepare"]
