"""One technique a file, as functions that two or more methods use, grouped by kind. No names of methods, printing or plans."""
