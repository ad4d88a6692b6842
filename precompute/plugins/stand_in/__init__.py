"""Stand-in: a lookup service inside a service's own tests."""
