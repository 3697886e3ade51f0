"""The examination of queues and of their server: what is wrong, what follows, and what ends it."""
