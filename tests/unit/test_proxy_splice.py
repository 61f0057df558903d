import json

import pytest

from loraproxy.proxy.splice import with_member


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"{}", b'{"lora":[]}'),
        (b' {\n "prompt" : "\\u00e9 \\ud800" }\n', b' {"lora":[],\n "prompt" : "\\u00e9 \\ud800" }\n'),
        (b'\xef\xbb\xbf{"a": 1.50}', b'\xef\xbb\xbf{"lora":[],"a": 1.50}'),
    ],
)
def test_a_member_that_was_not_there_becomes_the_first_and_nothing_else_changes(data, expected):
    assert with_member(data, "lora", [], present=False) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"lora": "x", "prompt": "\\"lora\\": 1"}', b'{"lora":[0], "prompt": "\\"lora\\": 1"}'),
        (b'{ "a" : {"lora": 1}, "lor\\u0061" :\t[1, {"b": "}"}] }', b'{ "a" : {"lora": 1}, "lora":[0] }'),
        (b'{"lora":1,"n":1e3,"lora":{"a":[]}}', b'{"lora":[0],"n":1e3,"lora":[0]}'),
        ('\ufeff{"é": "ü", "lora": null}'.encode(), '\ufeff{"é": "ü", "lora":[0]}'.encode()),
    ],
)
def test_a_member_is_replaced_wherever_it_stands_and_nothing_else_changes(data, expected):
    replaced = with_member(data, "lora", [0], present=True)
    assert replaced == expected
    assert json.loads(replaced.decode("utf-8-sig"))["lora"] == [0]
