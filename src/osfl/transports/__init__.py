"""Carrying bytes and receipts as files. Never looks inside a bundle."""
