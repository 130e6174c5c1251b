"""How to compute and to keep files: workers, meter, cache, atomic files, environment. Knows no round."""
