"""How a run ends, and how that is written."""
