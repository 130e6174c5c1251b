"""What every room speaks of: types, the method interface, plan, result, registry, topology, errors. Imports no other room."""
