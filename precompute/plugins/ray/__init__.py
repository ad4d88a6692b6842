"""Ray: a run's shards computed by actors of a Ray cluster."""
