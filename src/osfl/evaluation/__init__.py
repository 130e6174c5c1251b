"""Numbers about finished things, and which method they speak for (`advice`). No training, no drawing."""
