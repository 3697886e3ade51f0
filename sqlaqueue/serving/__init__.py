"""What the two Consumers share, from the plan of one Consumer to the end of a run.

``plan`` resolves what a Consumer was given. ``lanes`` and ``runs`` are its work, written once as generators whose
``steps`` a thread or a task carries out; ``turns`` and ``pace`` say who claims when. ``operations``, ``ledger`` and
``tending`` talk to the database; ``outcomes`` turns what a handler raised into what is written. ``crew`` is what the
threads or tasks of one ``shift`` have in common.
"""
