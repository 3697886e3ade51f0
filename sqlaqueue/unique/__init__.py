"""Enqueue unique jobs: insert those that do not exist, and return the others."""
