"""Grammars that would end or hang the process inside llama.cpp, refused before it sees them."""

from __future__ import annotations

import pytest
from scripted import ByteModel

from loraproxy.errors import InvalidRequest
from loraproxy.worker.grammar_check import MAX_CHARACTERS, MAX_NESTING, check_grammar
from loraproxy.worker.params import parse_params

CHAIN = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(6000)) + 'r6000 ::= "a"\n'

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}, "name": {"type": "string", "maxLength": 99}}}

HOSTILE = {
    "nested parentheses": ("root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000, "parentheses in one another"),
    "a chain of rules": (CHAIN, "too deep"),
    "left recursion": ('root ::= root "a" | "b"', "left-recursive"),
    "left recursion in a circle": ('root ::= a "x"\na ::= root | "y"', "left-recursive"),
    "left recursion behind what may be empty": (
        'root ::= n root "x" | "y"\nn ::= m\nm ::= | "z"',
        "left-recursive: rule 'root' starts with itself",
    ),
    "left recursion in a group": ('root ::= (root | "a")* "b"', "left-recursive"),
    "reversed limits": ('root ::= "a"{5,2}', "{5,2} at character 12 has its limits reversed"),
    "too many repetitions": ('root ::= "a"{3000}', "repeats more than 2000 times"),
    "repetitions of something long": ('root ::= "' + "a" * 100_000 + '"{2000}', "too large"),
    "optional rests of something long": ('root ::= "' + "a" * 100_000 + '"{0,2000}', "too large"),
    "repetitions of repetitions": ('root ::= c\na ::= "x"?\nb ::= a{2000}\nc ::= b{2000}', "too ambiguous"),
    "alternatives without end": ("root ::= " + " | ".join(['"a"'] * 6000), "too ambiguous"),
    "nothing but options": ("root ::= " + '"a"? ' * 6000, "too ambiguous"),
    "a megabyte": ('root ::= "' + "a" * 2**20 + '"', f"at most {MAX_CHARACTERS} are taken"),
    "a zero": ('root ::= "a"\0', "zero character"),
    "an open parenthesis": ('root ::= ("a"', "the parenthesis at character 9 is not closed"),
    "an open string": ('root ::= "a', "unexpected '\"' at character 9"),
    "an open range": ("root ::= [a", "unexpected '[' at character 9"),
    "nothing to repeat": ("root ::= *", "nothing to repeat at character 9"),
    "an unknown rule": ("root ::= x", "there is no rule 'x'"),
    "no root": ('a ::= "x"', "there is no rule 'root'"),
    "no rule": ("", "there is no rule 'root'"),
    "no alternatives": ("root", "it ends where ::= should be"),
    "two rules in a line": ('root ::= "a" b ::= "c"', "expected the end of the line at character 15"),
}


@pytest.mark.parametrize(("grammar", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_grammar_is_refused_with_the_reason(grammar: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_grammar(grammar)
    assert message in caught.value.message
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a"',
        'root ::= | "a"\r\nb ::= ""\n',
        'root ::= [^\\]"a-]+ <think> !<[12]> . "\\"\\\\\\x41" # a comment "\n# another\n a ::= (\n "x" |\n "y")\n',
        'root ::= n root | "y"\nn ::= m\nm ::= | "z"',
        'root ::= ("a"?)* "b"',
        'root ::= "a"{0,5000} "b"{2} "c"{ 1 , } "d"{1,3}+',
        'root ::= "(" root ")" | "x"',
        "root ::= " + "(" * MAX_NESTING + '"a"' + ")" * MAX_NESTING,
        "root ::= item{0,2000}\nitem ::= [a-z]+ " + '("," [a-z]+)*',
    ],
)
def test_a_grammar_that_llama_cpp_can_bear_is_taken(grammar: str) -> None:
    check_grammar(grammar)


def test_both_fields_that_give_a_grammar_are_checked() -> None:
    model = ByteModel()
    with pytest.raises(InvalidRequest, match="left-recursive"):
        parse_params({"grammar": 'root ::= root "a"'}, model, (), 4)
    many = {"enum": [str(number) for number in range(6000)]}
    with pytest.raises(InvalidRequest, match="too ambiguous"):
        parse_params({"json_schema": many}, model, (), 4)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "boolean"}}},
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": NODE}},
        {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "minItems": 2, "maxItems": 50},
        {"type": "string", "pattern": "^[a-z]{3}(-[0-9]+)*$"},
        {"oneOf": [{"type": "integer", "minimum": -5, "maximum": 100}, {"format": "date-time", "type": "string"}]},
        {"type": "object", "additionalProperties": {"type": "number"}},
    ],
)
def test_grammars_of_usual_schemas_are_taken(schema: dict[str, object]) -> None:
    assert parse_params({"json_schema": schema}, ByteModel(), (), 4).sampling.grammar
