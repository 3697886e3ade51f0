"""Live updates: which viewers are told that something has changed."""
