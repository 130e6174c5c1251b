"""The round folder: its state and lock, phases, storage, egress check, provenance and forgetting. Carries no bytes."""
