"""The threads or tasks that execute routines, from the start of a run to its shutdown."""
