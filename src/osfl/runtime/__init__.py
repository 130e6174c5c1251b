"""How to compute and to keep files: workers, meter, cache, atomic files, environment. Knows no round.

Begin with workers.py (clients in parallel), machine.py, meter.py (costs) and atomic.py (files whole or not at all).
"""
