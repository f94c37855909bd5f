"""Answers on a terminal: text as it comes on stdout, its speed dimly on stderr; and conversations there."""

import signal
import sys
import time
from typing import Any

from rich.console import Console

from kvloom.interrupts import Interrupts
from kvloom_client import Client, KvloomClientError

HELP = """\
/system TEXT   instructions for the model, from the next answer on; without TEXT: none
/reset         forget the conversation
/quit          leave, as Ctrl-D does
Ctrl-C interrupts an answer; what came of it stays in the conversation."""

_PROMPT = "> "


def print_answer(client: Client, request: dict[str, Any], said: list[str], interrupts: Interrupts) -> None:
    """Ask, and print the answer as it comes and then its speed, also when it breaks off or a signal ends it.

    Args:
        client: whom to ask.
        request: what to ask, as ``Client.stream`` takes it.
        said: gets the answer's parts, also those before it broke off.
        interrupts: a signal cancels the answer.

    Raises:
        KvloomClientError: there is no answer, or no whole one.
    """
    start = time.perf_counter()
    arrivals: list[tuple[float, int]] = []  # when, and how many tokens
    try:
        with client.stream(**request) as stream, interrupts.calling(stream.cancel):
            for chunk in stream:
                arrivals.append((time.perf_counter(), chunk.num_output_tokens))
                said.append(chunk.text)
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
    finally:
        if arrivals:
            print(flush=True)
            speed = Console(stderr=True, highlight=False)
            speed.print(_speed(start, arrivals), style="dim", markup=False, soft_wrap=True)


class Chat:
    """A conversation: what is typed (or piped in) line by line, and the answers to it.

    The server keeps nothing: every turn sends the whole history.
    """

    def __init__(self, client: Client, sampling: dict[str, Any], interrupts: Interrupts, system: str | None = None):
        self._client = client
        self._sampling = sampling
        self._interrupts = interrupts
        self._system = system
        self._history: list[dict[str, str]] = []
        self._interactive = sys.stdin.isatty()

    def run(self) -> None:
        """Talk until the input ends or ``/quit``.

        Raises:
            KeyboardInterrupt: SIGTERM, or SIGINT between the turns of an input that is no terminal.
            KvloomClientError: a turn failed and the input is no terminal; at a terminal it is told instead.
        """
        if self._interactive:
            # history and editing of the line; importing it is what gives them to input()
            import readline  # noqa: F401

            _note("/help lists what else can be typed; Ctrl-D leaves")
        else:
            sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
        while (line := self._read()) is not None:
            if line.startswith("/"):
                if not self._command(line):
                    return
            elif line.strip():
                self._turn(line)

    def _read(self) -> str | None:
        """The next line; None at the end of the input, or when Ctrl-C is typed instead of one."""
        try:
            with self._interrupts.raising():
                return input(_PROMPT if self._interactive else "")
        except EOFError:
            self._leave_line()
            return None
        except KeyboardInterrupt:
            self._leave_line()
            if self._interactive and self._interrupts.signum == signal.SIGINT:
                return None
            raise

    def _leave_line(self) -> None:
        if self._interactive:
            print()

    def _command(self, line: str) -> bool:
        """Do what a line that begins with a slash says; False: leave."""
        name, _, text = line.partition(" ")
        if name == "/quit":
            return False
        if name == "/reset":
            self._history.clear()
        elif name == "/system":
            self._system = text.strip() or None
        elif name == "/help":
            _note(HELP)
        else:
            _note(f"{name} is no command; a message that begins with a slash needs a space before it\n{HELP}")
        return True

    def _turn(self, text: str) -> None:
        turn = {"role": "user", "content": text}
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        request = {"messages": [*system, *self._history, turn], "sampling_parameters": self._sampling}
        said: list[str] = []
        try:
            print_answer(self._client, request, said, self._interrupts)
        except KvloomClientError as error:
            if not self._interactive:
                raise
            _note(f"kvloom: {error}")
        if self._interrupts.signum == signal.SIGTERM:
            raise KeyboardInterrupt
        if self._interrupts.signum == signal.SIGINT:
            # also one that came too late for the answer: it was not meant for the conversation
            self._interrupts.forget()
        # a turn without any answer is as if it had never been
        if said:
            self._history += [turn, {"role": "assistant", "content": "".join(said)}]


def _speed(start: float, arrivals: list[tuple[float, int]]) -> str:
    (first, first_tokens), (last, _) = arrivals[0], arrivals[-1]
    tokens = sum(count for _, count in arrivals)
    text = f"first token after {(first - start) * 1000:.0f} ms, {tokens} tokens"
    return text if last == first else f"{text}, {(tokens - first_tokens) / (last - first):.1f} tokens/s"


def _note(text: str) -> None:
    print(text, file=sys.stderr)
