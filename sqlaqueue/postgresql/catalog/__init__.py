"""Reads pg_catalog: the triggers, functions, indexes and constraints that a database has, and how it prints them."""
