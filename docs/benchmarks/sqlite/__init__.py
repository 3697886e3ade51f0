"""Measurements on SQLite beside a loop on sqlite3 without a library, on the same disk and in turns."""
