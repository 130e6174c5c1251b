"""Drawing from results.json. Computes no number that is not there.

Begin with page.py (the report of a run) and comparison.py (of several); plots.py lists all drawings.
"""
