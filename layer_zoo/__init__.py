"""Finished sharded layers, each the rendering of a template."""

__all__: list[str] = []
