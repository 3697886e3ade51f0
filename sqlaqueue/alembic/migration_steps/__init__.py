"""Completes a migration: moves jobs to another strategy, asks about existing rows, splits the steps of live tables."""
