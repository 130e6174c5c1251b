"""The story of one paper a file, both sides in it. No bytes, paths, metrics, nor another method."""
