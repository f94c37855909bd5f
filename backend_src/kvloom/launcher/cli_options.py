"""Options that several commands of ``kvloom`` share."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

Model = Annotated[str | None, typer.Option(help="A Hugging Face folder, a GGUF file or 'default'.", metavar="PATH")]
Assignments = Annotated[list[str] | None, typer.Option("--set", help="A setting, see the end.", metavar="KEY=VALUE")]
Binary = Annotated[Path | None, typer.Option("--tritonserver", help="The tritonserver to start.", metavar="PATH")]
Repository = Annotated[Path | None, typer.Option(help="kvloom's model repository.", metavar="DIR")]
LogFile = Annotated[
    Path | None,
    typer.Option(
        help="Where tritonserver's output goes, to be kept; else a file that goes at the end.", metavar="FILE"
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show tritonserver's output on stderr.")]

Url = Annotated[str, typer.Option(help="Triton's gRPC endpoint; grpcs://HOST:PORT is encrypted.", metavar="HOST:PORT")]
CaFile = Annotated[
    Path | None, typer.Option(help="Who may have signed the certificate of --url, as PEM.", metavar="FILE")
]
Header = Annotated[
    list[str] | None,
    typer.Option(help="Sent with every request; @FILE takes lines from a file. May be repeated.", metavar="NAME:VALUE"),
]
Serve = Annotated[bool, typer.Option("--serve", help="Start a server just for this.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate for an answer.")]
Temperature = Annotated[float | None, typer.Option(help="0 takes the likeliest token.")]
TopP = Annotated[float | None, typer.Option(help="Choose among the likeliest tokens that have this much together.")]
TopK = Annotated[int | None, typer.Option(help="Choose among this many of the likeliest tokens.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends an answer; may be repeated.")]


class ListsSettings(TyperCommand):
    """A command with ``--set``, whose help ends with the names of the settings."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        from kvloom.config import Settings

        self.epilog = f"Settings: {', '.join(Settings.names())}. `kvloom serve --help` says what they mean."
        super().format_help(ctx, formatter)


class DescribesSettings(TyperCommand):
    """A command with ``--set``, whose help ends with the settings, their defaults and what they mean."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the end of the help."""
        from kvloom.config import Settings

        with formatter.section("Settings"):
            formatter.write_dl(
                [(f"{name}={default}", about.replace("`", "")) for name, default, about in Settings.described()]
            )
