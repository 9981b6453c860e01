"""Offline calls honour the output fields of `SamplingParams` as a server does."""

from __future__ import annotations

import pytest

from penstock.llm import LLM
from penstock.types import SamplingParams

PROMPT = "Once upon a time there was"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu", memory_gb=0.05, max_model_len=512)


def test_a_stop_token_has_no_text_unless_it_is_wanted(llm: LLM) -> None:
    (plain,) = llm.generate(PROMPT, SamplingParams(max_tokens=12))
    id = plain.token_ids[6]
    place = plain.token_ids.index(id)
    for keeps in (False, True):
        sampling = SamplingParams(
            max_tokens=12, stop_token_ids=(id,), include_stop_str_in_output=keeps
        )
        (stopped,) = llm.generate(PROMPT, sampling)
        assert stopped.token_ids == plain.token_ids[: place + 1]
        assert plain.text.startswith(stopped.text)
        shown = llm.tokenizer.decode(plain.token_ids[: place + keeps])
        assert stopped.text == shown


def test_a_stop_string_is_kept_where_that_is_asked(llm: LLM) -> None:
    (plain,) = llm.generate(PROMPT, SamplingParams(max_tokens=12))
    word = plain.text.split()[2]
    texts = [
        llm.generate(
            PROMPT, SamplingParams(max_tokens=12, stop=(word,), include_stop_str_in_output=keeps)
        )
        for keeps in (False, True)
    ]
    assert texts[1][0].text == texts[0][0].text + word


def test_bad_words_and_cut_prompts(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Tell me about rivers."}]
    word = llm.chat(messages).text.split()[1]
    assert word not in llm.chat(messages, SamplingParams(max_tokens=40, bad_words=(word,))).text
    (cut,) = llm.generate(PROMPT * 200, SamplingParams(max_tokens=1, truncate_prompt_tokens=5))
    assert cut.num_prompt_tokens == 5
    (fit,) = llm.generate(PROMPT * 200, SamplingParams(max_tokens=2, truncate_prompt_tokens=-1))
    assert fit.num_prompt_tokens == 510
