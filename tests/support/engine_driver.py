"""An engine without Triton, which the test steps."""

from collections.abc import Iterable
from pathlib import Path

from kvloom.config import Settings
from kvloom.conversation.manager import Triton
from kvloom.conversation.registry import only_turn
from kvloom.engine.build import build_engine
from kvloom.errors import RequestError
from kvloom.request import Delta, FinishReason, Request, SamplingParams, Sequence, Usage

REQUEST_FIELDS = {"arrival", "logprobs", "deadline", "priority", "cache_salt", "retain_s"}


class Answer(list[Delta]):
    """The deltas of one request. Its ``append`` is the sink."""

    @property
    def ids(self) -> list[int]:
        return [token for delta in self for token in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self)

    @property
    def reason(self) -> FinishReason | None:
        self.assert_one_final()
        return self[-1].finish_reason

    @property
    def error(self) -> RequestError | None:
        self.assert_one_final()
        return self[-1].error

    @property
    def usage(self) -> Usage:
        self.assert_one_final()
        assert self[-1].usage is not None
        return self[-1].usage

    def assert_one_final(self) -> None:
        assert [delta.final for delta in self] == [False] * (len(self) - 1) + [True]


class Driver:
    """Submits requests and steps the engine until all have ended."""

    def __init__(self, model: Path, triton: Triton | None = None, **settings: object):
        chosen = {"model": model, "weights": "fp32", "block_size": 16, "kv_blocks": 64, "threads": 1, **settings}
        built = build_engine(Settings.parse({key: str(value) for key, value in chosen.items()}), triton)
        self.engine = built.engine
        self.tokenizer = built.tokenizer

    def submit(self, prompt_ids: Iterable[int], request_id: str = "", **fields: object) -> tuple[Sequence, Answer]:
        """Queue a request. Fields that are not attributes of Request are sampling parameters."""
        about = {"arrival": 0.0, **{name: fields.pop(name) for name in REQUEST_FIELDS & fields.keys()}}
        params = SamplingParams.model_validate({"temperature": 0.0, "ignore_eos": True, **fields})
        request = Request(id=request_id, prompt_ids=tuple(prompt_ids), params=params, **about)
        answer = Answer()
        turn = only_turn(request, answer.append)
        self.engine.prepare(turn)
        self.engine.turns.submit(turn)
        return turn.sequence, answer

    def run(self) -> None:
        while self.engine.busy:
            self.engine.step()
            self.engine.check_invariants()
        self.assert_idle()

    def answer(self, prompt_ids: Iterable[int], **params: object) -> Answer:
        answer = self.submit(prompt_ids, **params)[1]
        self.run()
        return answer

    def assert_idle(self) -> None:
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
