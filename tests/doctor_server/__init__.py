"""Checks of the server that a doctor makes: each finding is provoked on a real server, and its fix removes it."""
