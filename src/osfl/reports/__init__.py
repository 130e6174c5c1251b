"""Drawing from results.json. Computes no number that is not there."""
