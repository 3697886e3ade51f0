"""A model check of the claim: an exhaustive search through the interleavings of concurrent transactions.

Read the files in this order: ``design`` lists the choices that make a claim correct, ``state`` is what the database and
the workers remember, ``claims`` has the steps of a claim, ``changes`` the other operations, ``invariants`` what must
hold, ``search`` visits every reachable state, and ``variants`` lists designs that break an invariant.
"""
