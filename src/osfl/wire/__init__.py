"""The file format of bundles: packing, signing, sealing, and the gate that checks them. No learning, no network, no torch."""
