"""The long-running form: claim jobs, run a handler for each, settle them."""
