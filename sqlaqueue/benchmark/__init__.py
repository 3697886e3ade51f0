"""Benchmark a copy of your queue in your own database: ``sqlaqueue bench``, or :func:`run_benchmark` for programs.

The copy is a table with the same types of columns as your model's, in a schema of its own; it is filled, drained and
dropped. It uses none of your tables, sequences, types or defaults.
"""

from sqlaqueue.benchmark.run import Benchmark, BenchmarkError, run_benchmark
from sqlaqueue.benchmark.shape import Shape, shape_of

__all__ = ["Benchmark", "BenchmarkError", "Shape", "run_benchmark", "shape_of"]
