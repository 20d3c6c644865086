"""Numbers on the command line, refused in words that people use."""

import click


class Number(click.IntRange):
    """A whole number."""

    name = "number"


class Seconds(click.FloatRange):
    """A length of time."""

    name = "number of seconds"
