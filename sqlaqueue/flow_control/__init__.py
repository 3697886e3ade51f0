"""What flow control is made of: the keys of limits, rates, orders and turns, as columns of a queue's table."""
