"""How the statements of the library are carried out by engines other than PostgreSQL.

The library writes each statement once, for PostgreSQL. An engine is prepared by one call,
``sqlaqueue.prepare(engine)``. From then on its own compiler translates what differs, and a statement that
changes rows in several places is executed in several steps of the same transaction.
"""
