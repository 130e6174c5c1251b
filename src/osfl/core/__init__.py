"""Types, the method interface, plan, result, registry, topology and errors. Imports no other package of ours.

Begin with types.py (what is exchanged), method.py (what a method provides), plan.py and result.py.
"""
