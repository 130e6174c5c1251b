"""Words ↔ calls and exit codes, one file a verb. No decisions about learning."""
