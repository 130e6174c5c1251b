"""The long evidence: `make bench` runs it all and writes benchmarks/records/."""
