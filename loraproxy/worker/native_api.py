"""llama-server's own completion API: ``/completion`` and ``/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loraproxy.worker.answers import Part, Result, dumps, probability_view, progress_json, sse, timings_json
from loraproxy.worker.params import CompletionParams
from loraproxy.worker.prompts import Vocabulary, detokenize
from loraproxy.worker.settings_view import Shown, full_settings
from loraproxy.worker.types import Done, Generation

NO_SLOT = -1
"""``id_slot``: a sequence may change its slot while it runs, so none is named."""


def selected_fields(paths: Sequence[str], answer: dict[str, Any]) -> dict[str, Any]:
    """The values at ``paths`` ("a" or "a/b"), each under its whole path; missing ones are left out."""
    selected: dict[str, Any] = {}
    for path in paths:
        value: Any = answer
        for key in path.split("/"):
            if not isinstance(value, dict) or key not in value:
                break
            value = value[key]
        else:
            selected[path] = value
    return selected


class NativeAnswer:
    """Answers in llama-server's own format."""

    end = b""

    def __init__(
        self, params: CompletionParams, alias: str, vocab: Vocabulary, generations: Sequence[Generation]
    ) -> None:
        self._params = params
        self._alias = alias
        self._vocab = vocab
        self._generations = generations
        self._view = probability_view(params)
        self._tails = [
            b',"stop":false,"id_slot":%d,"tokens_predicted":%%d,"tokens_evaluated":%d}\n\n' % (NO_SLOT, len(g.prompt))
            for g in generations
        ]

    def part(self, index: int, part: Part) -> bytes:
        """One event for every token."""
        if part.probs is None and part.progress is None and not self._params.timings_per_token:
            head = b'data: {"index":%d,"content":%b,"tokens":%b' % (index, dumps(part.text), dumps(part.tokens))
            return head + self._tails[index] % part.timings.predicted_n
        event: dict[str, Any] = {
            "index": index,
            "content": part.text,
            "tokens": list(part.tokens) or [0] * (part.progress is not None),
            "stop": False,
            "id_slot": NO_SLOT,
            "tokens_predicted": part.timings.predicted_n,
            "tokens_evaluated": len(self._generations[index].prompt),
        }
        if self._params.timings_per_token:
            event["timings"] = timings_json(part.timings)
        if part.progress is not None:
            event["prompt_progress"] = progress_json(part.progress)
        if part.probs is not None:
            event["completion_probabilities"] = self._view.tokens([part.probs])
        return sse(event)

    def finish(self, index: int, generation: Generation, done: Done) -> bytes:
        """The final event; content and tokens were in the events before."""
        return sse(self._final(Result(index, generation, done)))

    def whole(self, results: Sequence[Result]) -> Any:
        """One object, or an array of them for several completions."""
        answers = [self._final(result) for result in results]
        return answers[0] if len(answers) == 1 else answers

    def _final(self, result: Result) -> dict[str, Any]:
        params, generation, done = self._params, result.generation, result.done
        shown = Shown(
            stream=params.stream,
            timings_per_token=params.timings_per_token,
            n_keep=params.n_keep,
            n_discard=params.n_discard,
        )
        answer: dict[str, Any] = {
            "index": result.index,
            "content": result.content,
            "tokens": result.tokens if params.return_tokens else [],
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self._alias,
            "tokens_predicted": done.timings.predicted_n,
            "tokens_evaluated": len(generation.prompt),
            "generation_settings": full_settings(generation, shown),
            "prompt": detokenize(self._vocab, generation.prompt),
            "has_new_line": done.has_new_line,
            "truncated": done.truncated,
            "stop_type": done.reason,
            "stopping_word": done.stopping_word,
            "tokens_cached": done.tokens_cached,
            "timings": timings_json(done.timings),
        }
        if result.probs:
            answer["completion_probabilities"] = self._view.tokens(result.probs)
        return selected_fields(params.response_fields, answer) if params.response_fields else answer
