"""A whole federation in one process: simulate, compare, estimate, audit, and the checks that every method must pass."""
