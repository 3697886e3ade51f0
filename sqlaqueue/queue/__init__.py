"""Description of a queue: its configuration, roles and states, one run of a job, and the protocol of strategies."""
