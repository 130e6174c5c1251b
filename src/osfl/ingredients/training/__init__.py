"""Local training and what clients upload after it; multi-round references."""
