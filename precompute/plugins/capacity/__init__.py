"""Capacity plan: what a view takes at another number of rows, fitted to its own runs."""
