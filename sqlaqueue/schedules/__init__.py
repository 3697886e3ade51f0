"""Schedules: jobs that are enqueued regularly, without Consumers of their own and without I/O beside a Session."""
