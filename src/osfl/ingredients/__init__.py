"""One technique a file, as functions used by two or more methods. No names of methods, no printing, no plans."""
