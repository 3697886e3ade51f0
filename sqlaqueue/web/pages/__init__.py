"""The pages: one module for each, with a function of a Context that returns a response."""
