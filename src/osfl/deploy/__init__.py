"""How bundles travel between machines: files that people carry, and a package for each framework (Flower). No learning."""
