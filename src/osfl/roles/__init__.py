"""What each party of a round does, whoever carries the bytes: site, coordinator, peer, fusion of checkpoints, inspection.

Begin with site.py, coordinator.py and peer.py.
"""
