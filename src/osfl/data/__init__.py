"""Pixels, labels, splits, licences. Nothing about a method."""
