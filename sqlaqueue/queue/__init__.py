"""What a queue is to the rest of the library: its configuration, its columns and the contracts it relies on."""
