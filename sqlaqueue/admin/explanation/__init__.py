"""Why a job does not run: the facts are read by few statements, and pure functions make reasons of them."""
