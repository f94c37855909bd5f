"""Options that several commands of ``kvloom`` share."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

Model = Annotated[str | None, typer.Option(help="A Hugging Face folder, a GGUF file or 'default'.", metavar="PATH")]
Assignments = Annotated[list[str] | None, typer.Option("--set", help="A setting, see below.", metavar="KEY=VALUE")]
Binary = Annotated[Path | None, typer.Option("--tritonserver", help="The tritonserver to start.", metavar="PATH")]
Repository = Annotated[Path | None, typer.Option(help="kvloom's model repository.", metavar="DIR")]
LogFile = Annotated[
    Path | None,
    typer.Option(help="Append tritonserver's output to this file. Default: a temporary file.", metavar="FILE"),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show tritonserver's output on stderr.")]

Url = Annotated[str, typer.Option(help="Triton's gRPC endpoint; grpcs://HOST:PORT is encrypted.", metavar="HOST:PORT")]
CaFile = Annotated[
    Path | None, typer.Option(help="PEM file of the CA that signed the certificate of --url.", metavar="FILE")
]
Header = Annotated[
    list[str] | None,
    typer.Option(
        help="A header of every request; @FILE reads headers from a file. May be repeated.", metavar="NAME:VALUE"
    ),
]
Serve = Annotated[bool, typer.Option("--serve", help="Start a server for this command.")]
MaxTokens = Annotated[int | None, typer.Option(help="Maximum number of tokens of an answer.")]
Temperature = Annotated[float | None, typer.Option(help="0 takes the most likely token.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the most likely tokens with this total probability.")]
TopK = Annotated[int | None, typer.Option(help="Sample from this many of the most likely tokens.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="A string that ends an answer. May be repeated.")]


class ListsSettings(TyperCommand):
    """A command with ``--set``, whose help ends with the names of the settings."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        from kvloom.config import Settings

        self.epilog = f"Settings: {', '.join(Settings.names())}. `kvloom serve --help` describes them."
        super().format_help(ctx, formatter)


class DescribesSettings(TyperCommand):
    """A command with ``--set``, whose help ends with the settings, their defaults and descriptions."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the end of the help."""
        from kvloom.config import Settings

        with formatter.section("Settings"):
            formatter.write_dl(
                [(f"{name}={default}", about.replace("`", "")) for name, default, about in Settings.described()]
            )
