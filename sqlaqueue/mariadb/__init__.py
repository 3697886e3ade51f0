"""MariaDB as the database of queues, by PyMySQL or, for async sessions, by asyncmy.

::

    engine = prepare(create_engine("mariadb+pymysql://user:password@host/shop"))

Everything else is as with PostgreSQL, except for what is refused; each refusal names the reason. MySQL is refused.
"""
