"""The round folder: its state and lock, phases, storage, egress check, judging, provenance and forgetting. Carries no bytes.

Begin with folder.py (what a round folder holds) and phases.py (client phase, server phase, personalization). Uploads are
compared in judging/, and judgment.py keeps what was found.
"""
