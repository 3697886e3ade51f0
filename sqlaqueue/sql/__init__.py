"""What every statement stands on: types, hashes, INSERTs, errors, and whether an engine is prepared."""
