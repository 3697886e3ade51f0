"""``sqlaqueue demo``: a job for every file of a directory, several worker processes, one of which is killed.

Read it in this order:

* :mod:`~sqlaqueue.demo.models`: the job and its handler, as an application writes them.
* :mod:`~sqlaqueue.demo.worker`: a worker process, which runs a Consumer.
* :mod:`~sqlaqueue.demo.run`: enqueues the jobs, starts the workers, kills one and waits.
* :mod:`~sqlaqueue.demo.check`: reads all files again, and compares them with the table.
* :mod:`~sqlaqueue.demo.database`: the database, embedded or your own.
"""
