"""What hostile or careless requests do to those beside them: nothing."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from proxies import call
from servers import Server

QUESTION = {
    "lora": "pirate",
    "messages": [{"role": "user", "content": "Where can I sleep tonight?"}],
    "temperature": 0,
    "max_tokens": 16,
    "logprobs": True,
    "top_logprobs": 3,
}
BASE = {"prompt": "Hello there", "n_predict": 3, "seed": 1}
HUGE = 2**31 - 1
TOO_LARGE = "at these scales the model's output is no finite number; use smaller ones"

REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "no finite logits": ({"lora": {"pirate": 1e38}}, 400, TOO_LARGE),
    "no finite logits, sorted": ({"lora": {"pirate": 1e38}, "top_k": 0, "typical_p": 0.5}, 400, TOO_LARGE),
    "no finite logits, all shown": ({"lora": {"pirate": 1e38}, "n_probs": 9}, 400, TOO_LARGE),
    "nested parentheses": ({"grammar": "root ::= " + "(" * 100_000}, 400, "parentheses in one another"),
    "hidden left recursion": ({"grammar": 'root ::= n root "x" | "y"\nn ::= m\nm ::= | "z"'}, 400, "left-recursive"),
    "reversed limits": ({"grammar": 'root ::= "a"{5,2}'}, 400, "limits reversed"),
    "an endless schema": ({"json_schema": {"type": "string", "maxLength": HUGE}}, 400, "maxLength"),
    "a remote schema": ({"json_schema": {"$ref": "https://192.0.2.1/x.json"}}, 400, "not allowed"),
    "a grammar that no token fits": ({"grammar": "root ::= <[999999]>", "top_k": 1}, 500, "no token to choose from"),
    "a grammar that no token fits, greedy": ({"grammar": "root ::= <[999999]>", "temperature": 0}, 500, "no token"),
    "every token forbidden": ({"logit_bias": [[i, False] for i in range(49152)]}, 500, "no token to choose from"),
    "every end forbidden": ({"ignore_eos": True, "grammar": 'root ::= "a"'}, 500, "no token to choose from"),
    "many prompts": ({"prompt": ["x"] * 5000}, 400, "at most 1024"),
    "many probabilities": ({"n_probs": 100_000, "n_predict": -1}, 400, "lower n_probs"),
    "many completions": ({"n": 1000}, 400, "between 1 and 4"),
    "many samplers": ({"samplers": ["top_k"] * 9999}, 400, "at most 64"),
    "many stop strings": ({"stop": [str(i) for i in range(9999)]}, 400, "at most 256"),
    "many breakers": ({"dry_sequence_breakers": ["x"] * 999}, 400, "at most 64"),
    "a huge number": ({"temperature": 10**400}, 400, "Field 'temperature'"),
    "tokens that are none": ({"prompt": [HUGE]}, 400, "invalid tokens"),
    "deep arrays": ({"prompt": [[[[["x"]]]]]}, 400, "prompt"),
}

SERVED: dict[str, dict[str, Any]] = {
    "a look-back longer than any context": {"repeat_last_n": HUGE, "repeat_penalty": 1.1},
    "a DRY look-back longer than any context": {"dry_multiplier": 1, "dry_penalty_last_n": HUGE},
    "penalties at their limits": {"repeat_penalty": 3e38, "frequency_penalty": -3e38, "presence_penalty": 3e38},
    "no penalty": {"repeat_penalty": 0, "top_k": 0},
    "no temperature": {"temperature": 1e-38},
    "any temperature": {"temperature": 3e38, "dynatemp_range": 3e38, "dynatemp_exponent": -3e38},
    "keep everything": {"min_keep": HUGE, "top_k": 0, "typical_p": 0.1, "xtc_probability": 1, "xtc_threshold": 0},
    "mirostat beyond itself": {"mirostat": 1, "mirostat_tau": -1e38, "mirostat_eta": 1e38},
    "mirostat 2 beyond itself": {"mirostat": 2, "mirostat_tau": -1e38, "mirostat_eta": 1e38},
    "a bias added without end": {"logit_bias": [[5, 3e38]] * 10_000},
    "a very long stop string": {"stop": "x" * 1_000_000},
    "zeros in strings": {"prompt": "a\0b", "stop": "\0", "dry_multiplier": 1, "dry_sequence_breakers": ["\0", ""]},
    "no samplers": {"samplers": []},
    "an odd seed": {"seed": -(10**30)},
}


def reference(server: Server) -> str:
    """The pirate's answer with its log-probabilities."""
    status, _, answer = call(server, "POST", "/v1/chat/completions", QUESTION)
    assert status == 200, answer
    return json.dumps([answer["choices"][0]["message"], answer["choices"][0]["logprobs"]])


def worker_starts(server: Server) -> str:
    metrics: str = call(server, "GET", "/metrics")[2]
    return next(line for line in metrics.splitlines() if line.startswith("loraproxy_worker_restarts"))


@pytest.fixture(scope="module")
def before(product: Server) -> tuple[str, str]:
    return reference(product), worker_starts(product)


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_cannot_be_served_says_why(product: Server, before: tuple[str, str], name: str) -> None:
    more, status, message = REFUSED[name]
    received, _, answer = call(product, "POST", "/completion", {**BASE, **more})
    assert (received, answer["error"]["code"]) == (status, status), answer
    assert message in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 400


@pytest.mark.parametrize("name", SERVED)
def test_a_request_at_the_limits_is_served(product: Server, before: tuple[str, str], name: str) -> None:
    received, _, answer = call(product, "POST", "/completion", {**BASE, **SERVED[name]})
    assert received == 200, answer


def test_nobody_beside_them_notices(product: Server, before: tuple[str, str]) -> None:
    bad = [{**BASE, **more} for more, _, _ in REFUSED.values()] + [{**BASE, **more} for more in SERVED.values()]
    with ThreadPoolExecutor(3) as threads:
        others = [threads.submit(call, product, "POST", "/completion", body) for body in bad]
        answers = [reference(product) for _ in range(3)]
        assert {other.result()[0] for other in others} == {200, 400, 500}
    assert set(answers) == {before[0]}


def test_cells_that_hold_no_numbers_reach_nobody_else(product: Server, before: tuple[str, str]) -> None:
    """Longer prompts than the question leave such cells behind it, in every slot."""
    poison = {"prompt": "word " * 100, "n_predict": 2, "lora": {"pirate": 1e38}, "cache_prompt": False}
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: call(product, "POST", "/completion", poison), range(4)))
        assert set(threads.map(lambda _: reference(product), range(4))) == {before[0]}


def test_clients_that_leave_at_any_time_leave_nothing_behind(product: Server, before: tuple[str, str]) -> None:
    for number in range(8):
        body = json.dumps({"prompt": f"{number} " + "word " * 100, "n_predict": 600, "stream": number % 2 == 0})
        with socket.create_connection(("127.0.0.1", product.port)) as client:
            head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall((head + body)[: None if number % 3 else -5].encode())
            if number % 4 == 0 and number % 3:
                client.recv(64)
    while any(slot["is_processing"] for slot in call(product, "GET", "/slots")[2]):
        pass
    assert reference(product) == before[0]


def test_after_all_of_this_it_is_the_same_worker_with_the_same_answer(product: Server, before: tuple[str, str]) -> None:
    assert (reference(product), worker_starts(product)) == before
    assert not any(slot["is_processing"] for slot in call(product, "GET", "/slots")[2])
