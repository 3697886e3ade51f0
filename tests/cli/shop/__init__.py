"""An application whose queues the tests of the command line use."""
