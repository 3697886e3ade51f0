"""The checks of an examination, one file for each question."""
