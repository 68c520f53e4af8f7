"""An engine that writes down what it has seen."""

from pathlib import Path


class Upper:
    def __init__(self, suffix):
        self.suffix = suffix

    def __call__(self, values):
        with Path("seen.txt").open("a") as seen:
            seen.writelines(f"{value}\n" for value in values)
        return [value.upper() + self.suffix if value else ValueError("empty") for value in values]


def make(model=None, suffix=""):
    return Upper(suffix)
