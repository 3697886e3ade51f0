"""Finds the differences between the queues in the models and those in the database."""
