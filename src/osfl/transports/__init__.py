"""Carrying bytes and receipts: memory and files. Never looks inside a bundle."""
