"""``sqlaqueue demo``: one job for every file of a directory, several worker processes, and one of them killed.

Read it in this order:

* :mod:`~sqlaqueue.demo.models`: the job and its handler. This is what an application writes.
* :mod:`~sqlaqueue.demo.worker`: a worker process, which is a Consumer.
* :mod:`~sqlaqueue.demo.run`: the show. It enqueues the jobs, starts the workers, kills one and waits.
* :mod:`~sqlaqueue.demo.check`: reads all files again by itself and compares.
* :mod:`~sqlaqueue.demo.server`: the PostgreSQL that is there for the length of the demo, and nothing to learn from.
"""
