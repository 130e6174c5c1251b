"""Which method suits a consortium, from committed records alone: cells, their distance, constraints, a ranking."""
