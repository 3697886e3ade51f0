"""A soak: hours of steady load and random faults on all features, with one picture at the end.

``python -m tests.soak HOURS`` runs it, see :mod:`tests.soak.__main__`. On each other stand:

* ``queues``: the classes, their handlers, and the two tables by which each job's effect is checked;
* ``roles``: what the processes do: workers, a producer, an operator, and a monitor;
* ``samples``: what is measured every few seconds, of the processes and of the database;
* ``run``: one piece of a soak, with its faults;
* ``verdict``: whether the samples show a leak, and the table of figures;
* ``picture``: the samples as small charts.
"""
