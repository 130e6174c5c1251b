"""Synthetic images by optimizing pixels against trained models."""
