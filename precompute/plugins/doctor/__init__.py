"""Doctor: checks the machine, the installation and a project's stores."""
