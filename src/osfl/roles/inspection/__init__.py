"""Describe a bundle in text and figures, for those who decide whether it may be sent. Reads files, changes nothing."""
