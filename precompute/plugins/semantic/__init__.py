"""Semantic: a miss is answered by the row of the entity whose input is nearest."""
