"""Examines the queues of a live database: what is wrong, why it matters, and the command that repairs it."""
