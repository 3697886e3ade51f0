"""The sessions that a Consumer and its handlers use."""
