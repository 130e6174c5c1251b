"""Numbers about finished things, and a ranking of methods by them (`advice`). No training, no drawing."""
