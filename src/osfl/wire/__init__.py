"""Bytes ↔ messages, and saying no. No learning, no network, no torch."""
