"""Benchmarks of sqlaqueue and other queues, on the same server with the same jobs. ``nox -s bench`` runs them.

The test suite contains only the counts of :mod:`tests.benchmarks.test_costs`, which do not depend on the machine, the
arithmetic of the report, and the command ``sqlaqueue bench``.
"""
