"""The arrival times of the tokens of one answer."""

from dataclasses import dataclass, field

from kvloom_client import Chunk


@dataclass
class Arrivals:
    """The times of an answer's tokens as a reader sees them, in seconds of one clock.

    A reader does not see a chunk without text (a role, an end mark, half a character). Its tokens are counted with the
    next text. If a chunk has several tokens, the time since the previous chunk is divided among them.

    Attributes:
        begin: when the request was sent.
        end: when the answer ended.
        times: when each chunk with text came.
        counts: how many tokens came with each of these chunks.
        unseen: tokens that have come since then without text.
        outcome: ``ok``, ``cancelled`` by the user, ``failed``, or ``cut`` by the end of the test.
        turn: the number of the turn in its conversation, from 1; 0 for a question without a conversation.
        prompt_tokens: tokens of the prompt including the conversation's history, if the server reports them.
        cached_tokens: how many of them the server did not compute again.
        lost: whether the server had lost the conversation.
    """

    begin: float
    end: float = 0.0
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    unseen: int = 0
    outcome: str = ""
    turn: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    lost: bool = False

    def add(self, chunk: Chunk, now: float) -> None:
        """Record a chunk."""
        self.unseen += chunk.num_output_tokens
        if chunk.usage is not None:
            self.prompt_tokens = chunk.usage["prompt_tokens"]
            self.cached_tokens = chunk.usage["cached_tokens"]
        if chunk.text:
            self.times.append(now)
            # A server that does not report token counts sends one token at a time
            self.counts.append(max(1, self.unseen))
            self.unseen = 0

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(self.counts) + self.unseen

    @property
    def seconds(self) -> float:
        """Seconds from the request to the end."""
        return self.end - self.begin

    @property
    def ttft(self) -> float | None:
        """Seconds until the first token; None if there was none."""
        return self.times[0] - self.begin if self.times else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next, one for every token after the first chunk."""
        pairs = zip(self.times, self.times[1:], self.counts[1:], strict=False)
        return [(later - earlier) / count for earlier, later, count in pairs for _ in range(count)]
