"""Jobs that wait for others: batches and dependencies."""
