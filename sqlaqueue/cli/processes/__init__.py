"""Worker processes: the Consumers of one process, and the supervisor of several processes."""
