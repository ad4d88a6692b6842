"""Page: the status page at ``/``, and the page of one run."""
