"""Bulk enqueueing by COPY: :func:`~sqlaqueue.copy_in` and :func:`~sqlaqueue.async_copy_in`."""
