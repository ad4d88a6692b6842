"""Endpoints: models whose rows an OpenAI-compatible service answers."""
