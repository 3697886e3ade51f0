"""The verbs: statements for ``session.execute()``."""
