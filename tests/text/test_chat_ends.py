"""Where an answer to a chat ends."""

from pathlib import Path

import pytest

from kvloom.text.tokenizer import Tokenizer
from support.some_tokenizers import save_folder, sentencepiece

NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eot|>\n{% endfor %}", {"<|eot|>"}),
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }} \n<|eot|>{% endfor %}", {"<|eot|>"}),
        # nothing says that an answer ends: the next turn begins
        ("{% for m in messages %}<|eot|>{{ m.role }}: {{ m.content }}\n{% endfor %}", set()),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}<|eot|>", {"<|eot|>"}),
        ("{% for m in messages %}{{ m.content }} plain <|eot|>{% endfor %}", set()),
        ("{% for m in messages %}{{ raise_exception('never') }}{% endfor %}", set()),
        (None, set()),
    ],
)
def test_k11_an_answer_ends_where_the_template_ends_it(template: str | None, end: set[str], tmp_path: Path):
    tokenizer = sentencepiece()
    tokenizer.add_special_tokens(["<|user|>", "<|assistant|>", "<|eot|>"])
    named = NAMED if template is None else {**NAMED, "chat_template": template}
    folder = save_folder(tmp_path, tokenizer, config={"eos_token_id": 2}, **named)
    assert Tokenizer.from_folder(folder).eos_ids == {2} | {tokenizer.token_to_id(token) for token in end}
