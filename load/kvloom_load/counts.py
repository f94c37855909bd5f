"""Parses lists of numbers on the command line."""

import typer


def counts(text: str, option: str) -> list[int]:
    """Parse numbers like "1,4,16".

    Args:
        text: the option's value.
        option: the option's name, for the error.

    Raises:
        typer.BadParameter: the value is not a list of numbers of at least 1.
    """
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise typer.BadParameter(f"{text!r}: expected numbers of at least 1, like 1,4,16", param_hint=f"'{option}'")
    return numbers
