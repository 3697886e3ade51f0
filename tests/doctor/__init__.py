"""``doctor()`` and ``sqlaqueue doctor``: each fault is made in a database, found, and repaired by its fix."""
