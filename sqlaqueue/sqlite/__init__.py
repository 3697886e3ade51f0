"""SQLite as the database of queues: to try the library, for tests, and for a site on one machine.

::

    engine = prepare(create_engine("sqlite:///jobs.db"))

Everything else is as with PostgreSQL, except for what is refused; each refusal names the reason.
"""
