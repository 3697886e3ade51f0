"""The tests of the conformance suite, one class for each topic."""
