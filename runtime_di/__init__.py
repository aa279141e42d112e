"""The dependency-injection service container for distributed ML runtimes."""
