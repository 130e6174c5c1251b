"""What a bundle says, in words and pictures for people who decide whether it may leave. Reads files, changes nothing."""
