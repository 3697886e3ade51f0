"""Tests on a MariaDB server, which they start and stop themselves."""
