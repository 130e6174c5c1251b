"""Sums, means, Gaussians, clusters and class counts."""
