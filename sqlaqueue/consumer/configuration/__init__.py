"""What a Consumer is given: its options, the SQL made from them, and its handlers. Nothing here changes."""
