"""A project on disk: its layers, its lock, its files. Knows no template."""
