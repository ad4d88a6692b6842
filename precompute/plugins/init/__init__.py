"""Init: a project or a view that runs at once, from templates, over the user's file or a sample."""
