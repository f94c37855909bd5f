"""Conversations by chat messages: what a turn adds is what the template writes for the whole conversation."""

import pytest
from transformers import AutoTokenizer

from kvloom.conversation.continuation import ChatHistory, continue_chat
from kvloom.errors import InvalidArgument
from kvloom.scheduling.offloader import Costs
from kvloom.text.tokenizer import Tokenizer
from support.talks import Talks
from support.tiny_models import EOS, make_tiny

QUESTIONS = ["What is a cache?", "And   the dog?", "Why\n\nnot", "quick brown fox", "Café crème 12"] * 4
FORGETS_THOUGHTS = (
    "{% for message in messages %}{% set text = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last %}{% set text = text.split('~')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + text.strip() + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Like those of models that think: what comes before the answer is not repeated, and blanks around it neither."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def reference(model):
    """Transformers' own tokenizer, which renders whole conversations."""
    return AutoTokenizer.from_pretrained(model)


def user(text):
    return {"role": "user", "content": text}


def answer_to(reference, ids):
    text = reference.decode(ids[:-1] if ids[-1:] == [EOS] else ids, skip_special_tokens=False)
    return {"role": "assistant", "content": text}


def fed(answer):
    return list(answer.sequence.request.prompt_ids)


@pytest.mark.parametrize("ends", ["cut", "eos", "mixed"])
def test_turns_are_what_the_template_makes_of_the_whole(model, reference, ends):
    driver = Talks(model, kv_blocks=256)
    driver.engine._scheduler._offloader._costs = Costs(0.0, 1.0)
    messages, history = [{"role": "system", "content": "Be brief."}], []
    for turn, question in enumerate(QUESTIONS):
        new = [*messages, user(question)] if not turn else [user(question)]
        messages = [*messages, user(question)]
        # the end token right away, or never
        at_once = ends == "eos" or (ends == "mixed" and turn % 2)
        how = {"ignore_eos": False, "logit_bias": {EOS: 100.0}} if at_once else {}
        answer = driver.say("chat", messages=new, start=not turn, **how)
        prompt = fed(answer)
        whole = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert reference.decode(prompt, skip_special_tokens=False) == whole
        assert prompt[: len(history)] == history
        assert answer.usage.rerendered_tokens == 0
        assert answer.usage.cached_tokens == max(0, len(history) - 1)
        history = [*prompt, *answer.ids]
        messages = [*messages, answer_to(reference, answer.ids)]
    driver.end_all()


def test_a_canonical_conversation_is_fed_the_very_ids_of_its_rendering(model, reference):
    tokenizer = Tokenizer.from_folder(model)
    messages = [user("What is a cache?")]
    rendered = tokenizer.render_chat(messages)
    history, rendered, chat = tokenizer.encode_rendered(rendered), rendered.text, ChatHistory()
    for text in ("A place where things are kept.", "The dog did not mind it."):
        answer = [*tokenizer.encode_piece(text, ""), EOS]
        chat.add([*messages[-1:], {"role": "assistant", "content": text}], rendered, len(history), len(history))
        history += answer
        messages += [{"role": "assistant", "content": text}, user("Why?")]
        new = continue_chat(tokenizer, history, chat, messages[-1:], 1000)
        assert new.keep == len(history)
        history, rendered = [*history, *new.ids], new.rendered
        assert history == reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def test_what_the_template_writes_otherwise_is_fed_anew(tmp_path):
    model = make_tiny(tmp_path, max_position_embeddings=4096)
    reference = AutoTokenizer.from_pretrained(model)
    reference.chat_template = FORGETS_THOUGHTS
    reference.save_pretrained(model)
    driver = Talks(model, kv_blocks=256)
    stateless = Talks(model, kv_blocks=256, prefix_cache="false")
    messages, history, rerendered = [], [], 0
    tilde = reference.encode("~", add_special_tokens=False)
    assert len(tilde) == 1
    for turn, question in enumerate(QUESTIONS[:8]):
        messages = [*messages, user(question)]
        # a thought in every third answer
        how = {"logit_bias": {tilde[0]: 12.0}} if turn % 3 == 1 else {}
        answer = driver.say("chat", messages=messages[-1:], start=not turn, temperature=1.0, seed=turn, **how)
        prompt = fed(answer)
        whole = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert reference.decode(prompt, skip_special_tokens=False) == whole
        same = next((i for i, (a, b) in enumerate(zip(history, prompt, strict=False)) if a != b), len(history))
        assert answer.usage.rerendered_tokens == len(history) - same
        assert answer.usage.prompt_tokens == len(prompt)
        rerendered += answer.usage.rerendered_tokens
        # what stays is not computed again, up to a block
        assert answer.usage.cached_tokens >= same - 16
        alone = stateless.say("x", prompt, start=True, end=True, temperature=1.0, seed=turn, **how)
        assert answer.ids == alone.ids
        history = [*prompt, *answer.ids]
        messages = [*messages, answer_to(reference, answer.ids)]
    assert rerendered > 0
    driver.end_all()


def test_messages_after_other_turns(model, reference):
    driver = Talks(model, kv_blocks=256)
    raw = reference.encode("The quick brown fox")
    first = driver.say("chat", raw, start=True)
    second = driver.say("chat", messages=[user("Why?")])
    follow_up = "<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert fed(second) == [*raw, *first.ids, *reference.encode(follow_up, add_special_tokens=False)]
    third = driver.say("chat", raw)
    assert fed(third) == [*fed(second), *second.ids, *raw]
    driver.say("chat", messages=[user("Why?")])
    driver.end_all()


def test_a_refused_turn_of_messages_leaves_the_conversation_as_it_was(model, reference):
    driver = Talks(model, kv_blocks=256, test_fail_after_tokens=3)
    first = driver.say("chat", messages=[user("Hello")], start=True)
    long = driver.say("chat", messages=[user("long " * 9000)])
    assert isinstance(long.error, InvalidArgument)
    failed = driver.say("chat", messages=[user("not heard")], request_id="test-fail")
    assert failed.error is not None
    second = driver.say("chat", messages=[user("Why?")])
    messages = [user("Hello"), answer_to(reference, first.ids), user("Why?")]
    whole = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert reference.decode(fed(second), skip_special_tokens=False) == whole
    driver.end_all()


def test_an_interrupted_answer_is_closed(model, reference):
    driver = Talks(model, kv_blocks=256)
    first = driver.turn("chat", messages=[user("Hello")], start=True, max_tokens=50)
    unheard = driver.turn("chat", messages=[user("Well?")])
    last = driver.turn("chat", messages=[user("Why?")])
    driver.engine.cancel(unheard.sequence)
    for _ in range(4):
        driver.engine.step()
    driver.turns.cancel_running("chat")
    driver.run_all()
    nothing = {"role": "assistant", "content": ""}
    messages = [user("Hello"), answer_to(reference, first.ids), user("Well?"), nothing, user("Why?")]
    whole = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert reference.decode(fed(last), skip_special_tokens=False) == whole
    driver.end_all()
