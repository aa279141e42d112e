"""The entrypoints that runtime-di ships, one a file: its settings, its container and its runtime."""
