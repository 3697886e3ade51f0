"""The programs behind the figures of the pages: sqlaqueue and other queues, on the same server with the same jobs.

``nox -s bench`` runs them all. The tests count what does not depend on the machine, in ``tests/benchmarks``.
"""
