"""Features of a frozen encoder: made, stored and learned from."""
