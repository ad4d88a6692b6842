"""Back ends: other ways to compute the same module. Each takes a module and gives a callable; :mod:`precompute.precision` chooses."""
