"""Answers on a terminal: text as it comes on stdout, its speed dimly on stderr; and conversations there."""

import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from kvloom.launcher.interrupts import Interrupts
from kvloom_client import Client, KvloomClientError, NotFound, RequestFailed, Stream

HELP = """\
/system TEXT   instructions for the model, from the next answer on; without TEXT: none
/reset         forget the conversation
/quit          leave, as Ctrl-D does
Ctrl-C interrupts an answer, what came of it stays in the conversation; at the prompt it leaves."""

_PROMPT = "> "
_PATIENCE_S = 2.0
"""Seconds that a server gets for what is not an answer."""
_AGAIN_S = 0.2
"""Between two tries to end an answer."""


def print_answer(
    ask: Callable[[], Stream],
    said: list[str],
    interrupts: Interrupts,
    interrupt: Callable[[Stream], None] = Stream.cancel,
) -> Stream:
    """Ask, and print the answer as it comes and then its speed, also when it breaks off or a signal ends it.

    Args:
        ask: asks.
        said: gets the answer's parts, also those before it broke off.
        interrupts: a signal ends the answer.
        interrupt: how it does; called in a thread of its own.

    Returns:
        the answer's stream, which has ended.

    Raises:
        KvloomClientError: there is no answer, or no whole one.
    """
    start = time.perf_counter()
    arrivals: list[tuple[float, int]] = []  # when, and how many tokens
    try:
        with ask() as stream, interrupts.calling(lambda: interrupt(stream)):
            for chunk in stream:
                arrivals.append((time.perf_counter(), chunk.num_output_tokens))
                said.append(chunk.text)
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
            return stream
    finally:
        if arrivals:
            print(flush=True)
            speed = Console(stderr=True, highlight=False)
            speed.print(_speed(start, arrivals), style="dim", markup=False, soft_wrap=True)


class ChatSession:
    """A conversation: what is typed (or piped in) line by line, and the answers to it.

    The server keeps it and its cache, and a turn sends only what is new. What was said is kept here, too: where the
    server has lost the conversation, or may have another idea of it than what is to be seen here, it is told again.
    """

    def __init__(self, client: Client, sampling: dict[str, Any], interrupts: Interrupts, system: str | None = None):
        self._client = client
        self._sampling = sampling
        self._interrupts = interrupts
        self._system = system
        self._history: list[dict[str, str]] = []
        self._conversation = client.conversation()
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
        try:
            while (line := self._read()) is not None:
                if line.startswith("/"):
                    if not self._command(line):
                        return
                elif line.strip():
                    self._turn(line)
        finally:
            self._forget()

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
            self._forget()
        elif name == "/system":
            self._system = text.strip() or None
            self._forget()
        elif name == "/help":
            _note(HELP)
        else:
            _note(f"{name} is no command; a message that begins with a slash needs a space before it\n{HELP}")
        return True

    def _forget(self) -> None:
        """Let the server forget the conversation; the next turn begins a new one there."""
        try:
            self._conversation.end(timeout=_PATIENCE_S)
        except KvloomClientError as error:
            _note(f"kvloom: the server keeps the conversation for a while: {error}")
        self._conversation = self._client.conversation()

    def _turn(self, text: str) -> None:
        turn = {"role": "user", "content": text}
        said: list[str] = []
        try:
            try:
                self._answer(turn, said)
            except NotFound as error:
                if said or not self._history:
                    raise
                _note(f"kvloom: {error}; telling it again")
                self._answer(turn, said)
        except KvloomClientError as error:
            if said or not isinstance(error, RequestFailed):
                self._conversation.begun = False
            if not self._interactive:
                raise
            _note(f"kvloom: {error}")
        if self._interrupts.signum == signal.SIGTERM:
            raise KeyboardInterrupt
        if self._interrupts.signum == signal.SIGINT:
            # also one that came too late for the answer: it was not meant for the conversation
            self._interrupts.forget()
        # a turn without any answer is as if it had never been
        if any(said):
            self._history += [turn, {"role": "assistant", "content": "".join(said)}]
        elif said:
            # the server has it in the conversation
            self._conversation.begun = False

    def _answer(self, turn: dict[str, str], said: list[str]) -> None:
        stream = print_answer(lambda: self._ask(turn), said, self._interrupts, self._interrupt)
        if stream.cancelled:
            # given up, so that the server may have less or more of it. After its end: its tries set this, too
            self._conversation.begun = False

    def _ask(self, turn: dict[str, str]) -> Stream:
        """Send a turn, and what was said before it unless the server knows that."""
        if self._conversation.begun:
            messages = [turn]
        else:
            system = [] if self._system is None else [{"role": "system", "content": self._system}]
            messages = [*system, *self._history, turn]
        return self._conversation.stream(messages=messages, sampling_parameters=self._sampling)

    def _interrupt(self, stream: Stream) -> None:
        """Barge in: the server ends the answer and keeps what was said of it; without it the answer is given up."""
        try:
            # again and again: one that overtakes the turn on its way finds nothing to end
            while not (stream.ended or stream.cancelled):
                self._conversation.interrupt(timeout=_PATIENCE_S)
                time.sleep(_AGAIN_S)
        except KvloomClientError:
            stream.cancel()


def _speed(start: float, arrivals: list[tuple[float, int]]) -> str:
    (first, first_tokens), (last, _) = arrivals[0], arrivals[-1]
    tokens = sum(count for _, count in arrivals)
    text = f"first token after {(first - start) * 1000:.0f} ms, {tokens} tokens"
    return text if last == first else f"{text}, {(tokens - first_tokens) / (last - first):.1f} tokens/s"


def _note(text: str) -> None:
    print(text, file=sys.stderr)
