"""Benchmarks: sqlaqueue beside other queues, on the same server with the same jobs. ``nox -s bench`` runs them.

Part of the tests are only the counts of :mod:`tests.benchmarks.test_costs`, which are the same on every machine, the
arithmetic of the report, and what users can measure on their own database.
"""
