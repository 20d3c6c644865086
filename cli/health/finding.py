"""A finding of the doctor: one fact, and what is wrong with it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One fact about this machine, or about the project.

    Attributes:
        subject: What it is about; together they make sections.
        name: What it is called.
        value: The fact, in words.
        problem: What is wrong with it, a sentence; empty if nothing is.
        remedy: What mends that.
    """

    subject: str
    name: str
    value: str
    problem: str = ""
    remedy: str = ""
