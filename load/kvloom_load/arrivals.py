"""When the tokens of one answer came."""

from dataclasses import dataclass, field

from kvloom_client import Chunk


@dataclass
class Arrivals:
    """Times of an answer's tokens as a reader sees them, in seconds of one clock.

    A chunk without text (a role, a mark, half a character) shows nobody anything: its tokens count as come with the
    next text. The time between the chunks of two tokens and more is shared by them.

    Attributes:
        begin: when the request was sent.
        end: when the answer was over.
        times: when each chunk with text came.
        counts: how many tokens came with it.
        unseen: tokens that came since, without text.
        outcome: ``ok``, ``cancelled`` by the user, ``failed``, or ``cut`` by the end of the test.
        turn: which turn of a conversation the answer belongs to, from 1; 0 for a question without a conversation.
        prompt_tokens: tokens of the prompt with the conversation's history, where the server told them.
        cached_tokens: how many of them it did not compute anew.
        lost: the server did not have the conversation any more.
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
        """Note a chunk."""
        self.unseen += chunk.num_output_tokens
        if chunk.usage is not None:
            self.prompt_tokens = chunk.usage["prompt_tokens"]
            self.cached_tokens = chunk.usage["cached_tokens"]
        if chunk.text:
            self.times.append(now)
            # a server that does not count its tokens sends one at a time
            self.counts.append(max(1, self.unseen))
            self.unseen = 0

    @property
    def tokens(self) -> int:
        """How many tokens came."""
        return sum(self.counts) + self.unseen

    @property
    def seconds(self) -> float:
        """From the request to the end."""
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
