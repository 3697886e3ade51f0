"""Measurements of the library beside a loop written by hand, on the same server or disk and in turns."""
