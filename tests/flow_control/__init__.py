"""Flow control: limits, order, turns and rates per key."""
