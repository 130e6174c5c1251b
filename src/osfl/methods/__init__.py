"""One paper a file, both sides in it; a folder where its machinery is its own. No bytes, paths, metrics, nor another method."""
