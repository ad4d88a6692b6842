"""Iceberg: a view's snapshots as the versions of an Iceberg table beside them."""
