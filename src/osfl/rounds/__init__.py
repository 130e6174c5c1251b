"""The round folder: its state and lock, phases, storage, egress check, judging, provenance and forgetting. Carries no bytes."""
