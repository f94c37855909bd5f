"""Lists of numbers on the command line."""

import typer


def counts(text: str, option: str) -> list[int]:
    """The numbers of "1,4,16".

    Args:
        text: what the option got.
        option: its name, for the error.

    Raises:
        typer.BadParameter: it is something else.
    """
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise typer.BadParameter(f"{text!r}: numbers of at least 1, like 1,4,16", param_hint=f"'{option}'")
    return numbers
