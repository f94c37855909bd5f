"""Conversations of models whose tokenizer is of SentencePiece's kind: it puts blanks where a text begins."""

import random

import pytest
from transformers import PreTrainedTokenizerFast

from kvloom.conversation.continuation import ChatHistory, answer_text, continue_chat
from kvloom.text.tokenizer import Tokenizer
from support.some_tokenizers import sentencepiece
from support.talks import Talks
from support.tiny_models import make_sentencepiece_tiny

LLAMA_2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
ALPACA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '### Ask:\n' + message['content'] + '\n\n### Answer:\n' }}"
    "{% else %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
)
ENDS_TIGHT = LLAMA_2.replace("' ' + message['content'].strip()", "message['content']")
"""As Llama 2's, but an answer is written as it is."""

EOS = 2
TALK = [
    ("where is the cache", "the answer is that there is a cache"),
    ("two  spaces ", "the things are kept"),
    ("and 12 345?", "there \u2713 it is\nwhere it is kept"),
    ("why", "the cache"),
]


def tokenizers(template):
    """Ours and transformers' own."""
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    reference = PreTrainedTokenizerFast(tokenizer_object=sentencepiece(), **named, chat_template=template)
    return Tokenizer(reference, prefix=[1], eos_ids=[EOS]), reference


def user(text):
    return {"role": "user", "content": text}


def go_through(tokenizer, answers):
    """What is fed of each turn after the first, how many tokens of the history stay, the history, and the messages."""
    messages, chat = [user(TALK[0][0])], ChatHistory()
    rendered = tokenizer.render_chat(messages)
    fed, rendered, kept = tokenizer.encode_rendered(rendered), rendered.text, 0
    for (_, text), (question, _) in zip(TALK, TALK[1:], strict=False):
        answer = answers(fed, text)
        said = {"role": "assistant", "content": answer_text(tokenizer, answer)}
        chat.add([messages[-1], said], rendered, kept, len(fed))
        history = [*fed, *answer]
        new = continue_chat(tokenizer, history, chat, [user(question)], 1000)
        messages += [said, user(question)]
        fed, rendered, kept = [*history[: new.keep], *new.ids], new.rendered, new.keep
        yield fed, kept, history, messages


def canonical(tokenizer, blank):
    """The tokens that an answer has within the whole, cut off before the end token."""

    def answer(fed, text):
        before = tokenizer.decode(fed, skip_special_tokens=False)[-6:]
        start, ids = (tokenizer.encode_rendered(part) for part in (before, before + blank + text))
        assert ids[: len(start)] == start
        return ids[len(start) :]

    return answer


@pytest.mark.parametrize(("template", "blank"), [(LLAMA_2, " "), (ALPACA, "")], ids=["Llama 2", "Alpaca"])
@pytest.mark.parametrize("ends", [False, True], ids=["cut off", "ended"])
def test_the_ids_are_those_of_the_whole(template, blank, ends):
    tokenizer, reference = tokenizers(template)
    if ends and template is ALPACA:
        # it writes no end token: the one that the model wrote is part of the conversation all the same
        template = ALPACA.replace("'\n\n' }}{% endif", "eos_token + '\n\n' }}{% endif")
        tokenizer, reference = tokenizers(template)
    answer = canonical(tokenizer, blank)
    for fed, kept, history, messages in go_through(tokenizer, lambda fed, text: answer(fed, text) + [EOS] * ends):
        whole = reference.apply_chat_template(messages, tokenize=False)
        assert fed == reference(whole, add_special_tokens=False)["input_ids"]
        assert fed == reference.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        # Llama 2's writes a blank before the end token, which may be part of the answer's last tokens
        assert len(history) - kept <= (4 if template is LLAMA_2 else 0)


@pytest.mark.parametrize("template", [LLAMA_2, ALPACA], ids=["Llama 2", "Alpaca"])
@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_model_says_the_text_is_that_of_the_whole(template, seed):
    """Tokens that no tokenizer would make of their text, blanks at the end, halves of characters.

    A blank at the beginning stays where nothing is written otherwise, though the answer's text never has it.
    """
    tokenizer, reference = tokenizers(template)
    rng = random.Random(seed)
    ordinary = range(3, tokenizer.vocab_size)
    first = [
        token
        for token in ordinary
        if not reference.convert_ids_to_tokens(token).startswith("\N{LOWER ONE EIGHTH BLOCK}")
    ]
    for fed, _, _, messages in go_through(tokenizer, lambda fed, text: [rng.choice(first), *rng.sample(ordinary, 12)]):
        whole = reference.apply_chat_template(messages, tokenize=False)
        ids = reference(whole, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(fed, skip_special_tokens=False) == tokenizer.decode(ids, skip_special_tokens=False)


def test_an_answer_that_has_ended_is_not_ended_twice():
    tokenizer, reference = tokenizers(ENDS_TIGHT)
    answer = canonical(tokenizer, "")
    for fed, kept, history, messages in go_through(tokenizer, lambda fed, text: [*answer(fed, text), EOS]):
        assert kept == len(history), "nothing is written otherwise"
        assert fed.count(EOS) == sum(message["role"] == "assistant" for message in messages)
        whole = reference.apply_chat_template(messages, tokenize=False).replace(" </s>", "</s>")
        assert fed == reference(whole, add_special_tokens=False)["input_ids"]


def test_a_piece_after_text_has_no_blank_of_its_own():
    tokenizer, reference = tokenizers(LLAMA_2)
    for before, text in [("the", " cache"), ("the", "re is"), ("the", "\nx"), ("1", "2"), (".", "."), ("a", "\u2713")]:
        ids = reference(before, add_special_tokens=False)["input_ids"]
        piece = tokenizer.encode_after(ids[-1], text, "messages")
        assert tokenizer.decode([*ids, *piece]) == before + text
        assert tokenizer.encode_after(None, text, "text_input") == piece
    assert tokenizer.encode_after(EOS, "there", "messages") == tokenizer.encode_rendered("there")


@pytest.mark.parametrize("ends", [False, True], ids=["cut off", "ended"])
def test_raw_text_goes_on_as_within_one_text(tmp_path, ends):
    driver = Talks(make_sentencepiece_tiny(tmp_path))
    _, reference = tokenizers(LLAMA_2)
    end = {"ignore_eos": False, "logit_bias": {EOS: 100.0}} if ends else {"max_tokens": 3}
    first = driver.say("chat", text="where is the cache", start=True, **end)
    assert (first.ids == [EOS]) == ends
    history = [*first.sequence.request.prompt_ids, *first.ids]
    second = driver.say("chat", text="there it is")
    fed = list(second.sequence.request.prompt_ids)
    assert fed[: len(history)] == history
    if ends:
        assert fed == reference("where is the cache</s>there it is")["input_ids"]
    said = reference.decode(fed[len(history) :], skip_special_tokens=False)
    assert said == "there it is"
    assert reference.convert_ids_to_tokens(fed[len(history)]).startswith("\N{LOWER ONE EIGHTH BLOCK}") == ends
    driver.end_all()
