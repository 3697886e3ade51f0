"""Random inputs for whatever reads texts of strangers: a parser returns a value, or raises the error that it documents.

``python -m tests.fuzz --inputs 1000000`` tries many; the tests try some, and all inputs that once were a fault.
"""
