"""Numbers about finished things. No training, no drawing."""
