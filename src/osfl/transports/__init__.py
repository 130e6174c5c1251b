"""Carrying bytes and receipts. Never looks inside a bundle."""
