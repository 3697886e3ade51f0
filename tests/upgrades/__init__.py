"""Upgrades: the database and the programs of 0.1.0 beside those of this version."""
