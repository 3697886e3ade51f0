"""Fires schedules: for a Consumer that has some, and for a Scheduler."""
