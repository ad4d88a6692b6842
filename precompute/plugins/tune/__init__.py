"""Tune: which precision and back end computes a view's model fastest here, and near enough."""
