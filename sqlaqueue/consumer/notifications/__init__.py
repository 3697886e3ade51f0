"""What consumers of a queue tell each other, and when to poll."""
