"""A student learns from teachers' outputs."""
