"""Mapped classes as queues: :class:`~sqlaqueue.QueueMixin`, the queue attributes, and the run beside an instance."""
