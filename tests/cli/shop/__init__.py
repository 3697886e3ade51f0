"""An application, as somebody would write it, whose queues the tests of the command line work on."""
