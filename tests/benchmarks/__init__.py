"""Benchmarks: sqlaqueue beside other queues, on the same server with the same jobs. ``nox -s bench`` runs them.

Nothing here is part of the tests but :mod:`tests.benchmarks.test_costs`, whose counts are the same on every machine, and
the arithmetic of the report.
"""
