"""What a queue of yours does on your own database: ``sqlaqueue bench``, and :func:`run_benchmark` for programs.

A table of the same shape as your model's is made in a schema of its own, filled, drained and dropped. Nothing names a
table, a sequence, a type or a default of yours.
"""

from sqlaqueue.benchmark.run import Benchmark, BenchmarkError, run_benchmark
from sqlaqueue.benchmark.shape import Shape, shape_of

__all__ = ["Benchmark", "BenchmarkError", "Shape", "run_benchmark", "shape_of"]
