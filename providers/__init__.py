"""The services that runtime-di ships, one a file: its section, its implementation and its factory."""
