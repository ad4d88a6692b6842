"""Views that live: rows of nine kinds of view, night after night, and what may happen to them."""
