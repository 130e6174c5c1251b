"""Attacks on what clients send and on what generators make: lower bounds on what can be learned."""
