"""Plug-ins: powers that the rooms do without, one folder each; :mod:`precompute.store.doors` is the
page of the names that lead here."""
