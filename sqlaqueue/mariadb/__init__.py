"""MariaDB as the database of queues, by PyMySQL or, for async sessions, by asyncmy.

::

    engine = create_engine("mariadb+pymysql://user:password@host/shop")
    sqlaqueue.mariadb.prepare(engine)

Everything else is as with PostgreSQL, except for what is refused; each refusal names the reason. MySQL is refused.
"""

from sqlaqueue.mariadb.prepare import prepare

__all__ = ["prepare"]
