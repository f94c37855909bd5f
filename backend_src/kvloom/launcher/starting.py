"""Shows on stderr what a start is doing."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from kvloom import progress

PACKAGE = logging.getLogger("kvloom")


@contextmanager
def shown(plain: bool = False) -> Iterator[None]:
    """Meanwhile show what is being done, and warnings.

    On a terminal what is being done is one line, which goes at the end; elsewhere there is a line for each.

    Args:
        plain: line by line on a terminal, too, where other output goes there.
    """
    console = Console(stderr=True, highlight=False)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    on_terminal = console.is_terminal and not plain
    handler = _Handler(console, Progress(*columns, console=console, transient=True) if on_terminal else None)
    level = progress.log.level
    progress.log.setLevel(logging.INFO)
    PACKAGE.addHandler(handler)
    try:
        yield
    finally:
        PACKAGE.removeHandler(handler)
        progress.log.setLevel(level)
        handler.close()


class _Handler(logging.Handler):
    """Begins to show when there is something to show: a start that is refused at once leaves one line, its error."""

    def __init__(self, console: Console, live: Progress | None):
        super().__init__()
        self._console = console
        self._live = live
        self._task: TaskID | None = None

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.name != progress.log.name:
            self._print(f"{record.levelname.lower()}: {text}")
        elif self._live is None:
            self._print(text)
        elif self._task is None:
            self._task = self._live.add_task(text, total=None)
            self._live.start()
        else:
            self._live.update(self._task, description=text)

    def close(self) -> None:
        """Take the line away."""
        if self._live is not None and self._task is not None:
            self._live.stop()
        super().close()

    def _print(self, text: str) -> None:
        self._console.print(f"kvloom: {text}", markup=False, soft_wrap=True)
