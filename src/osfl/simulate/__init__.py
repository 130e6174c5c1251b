"""A whole federation in one process: simulate, compare, estimate, audit, and the checks that every method must pass.

Begin with run.py (one run, stage by stage), simulation.py (what is simulated) and compare.py (several methods).
"""
