"""How the functions for tests work in the transaction of a test's session."""
