"""Shows the progress of a start on stderr."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from kvloom import progress

PACKAGE = logging.getLogger("kvloom")


@contextmanager
def shown(plain: bool = False) -> Iterator[None]:
    """Show progress and warnings while the body runs.

    On a terminal the progress is one line, which is removed at the end. Otherwise each phase is a line.

    Args:
        plain: print lines on a terminal, too, because other output goes there.
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
    """Shows nothing before the first record, so that a start that fails at once prints only its error."""

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
        """Remove the line."""
        if self._live is not None and self._task is not None:
            self._live.stop()
        super().close()

    def _print(self, text: str) -> None:
        self._console.print(f"kvloom: {text}", markup=False, soft_wrap=True)
