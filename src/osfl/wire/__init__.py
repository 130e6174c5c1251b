"""The file format of bundles: packing, signing, sealing, and the gate that checks them. No learning, no network, no torch.

Begin with bundle.py (how a bundle is written), gate.py (how it is checked) and inbox.py (how it is stored).
"""
