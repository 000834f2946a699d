"""What commands give: a module a command."""

SCHEMA_VERSION = 1
"""Version of the objects that --json prints; a key that goes or changes its meaning raises it."""
