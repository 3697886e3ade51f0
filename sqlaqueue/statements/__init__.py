"""Functions that return statements for ``session.execute()`` of a Session or an AsyncSession.

::

    emails = session.execute(claim(Email, 10)).scalars().all()
    session.execute(complete(emails))

``claim()`` returns instances. Every other statement accepts one instance or several, and its statement returns the
primary keys of the jobs that it changed, composite keys as tuples: ``session.scalars(complete(emails)).all()``. The
rows of ``requeue()`` also say whether each job is pending again. A statement changes jobs once; the
:class:`~sqlaqueue.Consumer` handles errors and decides about retries.
"""
