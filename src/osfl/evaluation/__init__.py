"""Numbers about finished things, and a ranking of methods by them (`advice`). No training, no drawing.

Begin with scores.py (a model on test images), comparison.py (runs side by side) and privacy/ (attacks).
"""
