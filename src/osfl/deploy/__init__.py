"""Rounds over a network, one package for each framework that carries them."""
