"""Types, the method interface, plan, result, registry, topology and errors. Imports no other package of ours."""
