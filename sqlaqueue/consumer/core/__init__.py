"""What the routines of a Consumer are made of."""
