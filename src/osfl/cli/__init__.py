"""The command line, one file a verb: parses options, calls the package, sets exit codes. No decisions about learning."""
