"""Streams answers to the terminal, with their speed on stderr, and runs chat sessions there."""

import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from kvloom.launcher.interrupts import Interrupts
from kvloom_client import Client, KvloomClientError, NotFound, RequestFailed, Stream

HELP = """\
/system TEXT   set instructions for the model, from the next answer on; without TEXT remove them
/reset         forget the conversation
/quit          exit, like Ctrl-D
Ctrl-C interrupts an answer; the text so far stays in the conversation. At the prompt it exits."""

_PROMPT = "> "
_PATIENCE_S = 2.0
"""Timeout in seconds for control requests."""
_AGAIN_S = 0.2
"""Seconds between two attempts to end an answer."""


def print_answer(
    ask: Callable[[], Stream],
    said: list[str],
    interrupts: Interrupts,
    interrupt: Callable[[Stream], None] = Stream.cancel,
) -> Stream:
    """Send a request and print its answer as it comes, then its speed, even if the answer fails or a signal ends it.

    Args:
        ask: sends the request.
        said: receives the parts of the answer, even if it fails later.
        interrupts: a signal ends the answer.
        interrupt: ends the answer after a signal. Called in a separate thread.

    Returns:
        The answer's stream, which has ended.

    Raises:
        KvloomClientError: the request or its answer failed.
    """
    start = time.perf_counter()
    arrivals: list[tuple[float, int]] = []  # (time, number of tokens)
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
    """A chat with lines from the terminal or a pipe as messages.

    The server keeps the conversation and its KV cache, and a turn sends only new messages. The messages are kept here,
    too. If the server has lost the conversation, or its history may differ from the text on the terminal, all messages
    are sent again.
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
        """Chat until the input ends or ``/quit``.

        Raises:
            KeyboardInterrupt: SIGTERM, or SIGINT between two turns if the input is not a terminal.
            KvloomClientError: a turn failed and the input is not a terminal. On a terminal the error is printed.
        """
        if self._interactive:
            # The import gives input() a history and line editing
            import readline  # noqa: F401

            _note("/help lists the commands; Ctrl-D exits")
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
        """The next line; None at the end of the input or after Ctrl-C on a terminal."""
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
        """Run the command in a line that begins with a slash. Returns False for ``/quit``."""
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
            _note(f"unknown command {name}; to send a message that begins with a slash, put a space before it\n{HELP}")
        return True

    def _forget(self) -> None:
        """End the conversation on the server. The next turn starts a new one."""
        try:
            self._conversation.end(timeout=_PATIENCE_S)
        except KvloomClientError as error:
            _note(f"kvloom: could not end the conversation; the server keeps it until it expires: {error}")
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
                _note(f"kvloom: {error}; sending all messages again")
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
            # Even if it came too late for the answer, it must not end the chat
            self._interrupts.forget()
        # A turn without any answer is dropped
        if any(said):
            self._history += [turn, {"role": "assistant", "content": "".join(said)}]
        elif said:
            # The server has added the turn to the conversation
            self._conversation.begun = False

    def _answer(self, turn: dict[str, str], said: list[str]) -> None:
        stream = print_answer(lambda: self._ask(turn), said, self._interrupts, self._interrupt)
        if stream.cancelled:
            # The server may have kept less or more of the answer. This must come after the stream's end, whose attempts
            # set `begun`, too
            self._conversation.begun = False

    def _ask(self, turn: dict[str, str]) -> Stream:
        """Send a turn, with all earlier messages unless the server has them."""
        if self._conversation.begun:
            messages = [turn]
        else:
            system = [] if self._system is None else [{"role": "system", "content": self._system}]
            messages = [*system, *self._history, turn]
        return self._conversation.stream(messages=messages, sampling_parameters=self._sampling)

    def _interrupt(self, stream: Stream) -> None:
        """Let the server end the answer and keep the text so far. If that fails, cancel the stream."""
        try:
            # Repeated, because an interrupt that overtakes the turn has no effect
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
