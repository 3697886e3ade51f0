"""From a mapped class to a queue."""
