"""Synthetic images from generator networks, and how they are shown."""
